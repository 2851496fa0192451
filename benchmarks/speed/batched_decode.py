"""Compares our decode steps with those of llama.cpp's benchmarks, on the same weights: `llama-batched-bench` for many
sequences, `llama-bench` for one.

    python benchmarks/speed/batched_decode.py --llama-bench DIR -o FILE

The two sides run in turn. A step of ours counts if it adds one token to every sequence and computes no prompt. Its time
includes the engine's work between launches. llama.cpp computes all prompts first and then times the same number of
steps, with flash attention on or off, whichever is faster. With `--kv-cache-dtype q8_0`, both sides have such a cache,
for which llama.cpp needs flash attention. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write

from megakernel import LLM, SamplingParams
from megakernel.isa import Dtype
from megakernel.model import open_checkpoint
from megakernel.model.gguf_writer import write_gguf
from megakernel.serving.bench.peers.contest import Task, Trial
from megakernel.serving.bench.peers.llama_bench import LlamaBench, tool
from megakernel.serving.engine.engine import Step


def our_steps(llm: LLM, work: Trial, seed: int) -> list[float]:
    """Return the times, in seconds, of `work.decode_steps` steps that add one token to every sequence."""
    steps: list[float] = []
    moment = perf_counter()

    def note(step: Step) -> None:
        nonlocal moment
        before, moment = moment, perf_counter()
        if step.rows == [1] * work.sequences:
            steps.append(moment - before)

    ids = np.random.default_rng(seed).integers(0, llm.config.vocab, (work.sequences, work.prompt_tokens)).tolist()
    # Each of the first steps computes one prompt, and also a token of each sequence whose prompt is complete. So a
    # sequence may get up to one token per other sequence before all sequences decode.
    params = SamplingParams(temperature=0.0, max_tokens=work.decode_steps + work.sequences + 1, ignore_eos=True)
    llm.generate(ids, params, on_step=note)
    return steps[: work.decode_steps]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="DIR", help="folder of a llama.cpp build")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "q8_0"), default="auto")
    args = parser.parse_args()
    work, quantised = Trial(args.sequences, args.prompt_tokens, args.steps), args.kv_cache_dtype == "q8_0"
    runs: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            args.model,
            weights="bf16",
            dtype="bf16",
            kv_cache_dtype=args.kv_cache_dtype,
            max_num_seqs=work.sequences,
            max_context=work.prompt_tokens + work.decode_steps + work.sequences + 1,
        ) as llm,
    ):
        gguf = Path(folder) / "model.gguf"
        write_gguf(open_checkpoint(args.model), gguf, Dtype.BF16)
        peer = LlamaBench(
            tool(args.llama_bench, batched=work.sequences > 1),
            Task(args.model, str(gguf), "bf16", "bf16", llm.threads, False, work, quantised),
        )
        first = peer.settings("batch")[0]
        search = [first] if quantised else [first | {"flash_attention": on} for on in (True, False)]
        tried = [(peer.seconds("decode", settings), settings) for settings in search]
        best = min(tried, key=lambda one: one[0])[1]
        our_steps(llm, work, 0)
        for run in range(args.runs):
            ours = our_steps(llm, work, run + 1)
            assert len(ours) == work.decode_steps, "too few steps contained every sequence"
            runs.append({"ours_step_s": ours, "theirs_s": peer.seconds("decode", best)})
            print({"ours": sum(ours), "theirs": runs[-1]["theirs_s"]}, file=sys.stderr)
    rates = {
        "ours": [work.tokens("decode") / sum(run["ours_step_s"]) for run in runs],
        "llama.cpp": [work.tokens("decode") / run["theirs_s"] for run in runs],
    }
    ratio = median(rates["ours"]) / median(rates["llama.cpp"])
    summary = {name: {"tokens_per_s": median(some), "of": sorted(some)} for name, some in rates.items()}
    print(summary, ratio)
    write(args.output, {"ratio": ratio, "summary": summary, "settings": best, "runs": runs})


if __name__ == "__main__":
    main()
