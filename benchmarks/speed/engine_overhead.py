"""Measures what the engine costs besides the launches: `python benchmarks/speed/engine_overhead.py [-o FILE]`.

Everything that the host does for a step (planning, building the step table, reading back) runs in one thread. The cost
is that thread's processor time, during launches and between them. Prompts differ in length, so that sequences fill
pages and enter KV blocks in different steps. The script prints one JSON object with two measurements:

share     decode of 64 sequences of SmolLM2-135M on the CPU backend: the host's time per token and step, and the
          fraction of a step's wall time outside launches; `text` includes detokenization, `ids` does not
flat      decode of 1, 64, 1,024 and 4,096 sequences of a tiny model on the null backend, which computes nothing: the
          host's time per token and step, which should not depend on the number of sequences
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, text, write

from megakernel import LLM, SamplingParams
from megakernel.model import ModelConfig, RandomCheckpoint
from megakernel.serving.text.codec import single_tokens

TINY = RandomCheckpoint(
    "tiny", ModelConfig(vocab=512, hidden=64, ffn=128, layers=1, heads=4, kv_heads=2, head_dim=16, max_context=2048), 0
)
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)


def measure(
    llm: LLM, sequences: int, steps: int, prompt: tuple[int, int], *, reading: bool = False
) -> dict[str, float]:
    """Time `steps` decode steps of `sequences` sequences, whose prompt lengths are drawn from the range `prompt`.

    With `reading`, the time to convert the tokens to text counts too.
    """
    engine, rng = llm.engine, random.Random(0)
    vocab = engine.dims.model.vocab
    requests = [
        engine.add([rng.randrange(3, vocab) for _ in range(rng.randint(*prompt))], PARAMS) for _ in range(sequences)
    ]
    transcripts = {request.first: llm.codec.transcripts(request.prompt_ids, PARAMS)[0] for request in requests}

    def step() -> float:
        done = engine.step()
        for token in single_tokens(done.tokens) if reading else ():
            transcripts[token.choice].add(token)
        return done.output.seconds

    while any(request.choices[0].outputs < 2 for request in requests):
        step()
    host, wall, launch = [], [], []
    for _ in range(steps):
        host_at, wall_at = time.thread_time(), time.perf_counter()
        launch.append(step())
        host.append(time.thread_time() - host_at)
        wall.append(time.perf_counter() - wall_at)
    for request in requests:
        engine.abort(request)
    return {
        "host_us_per_token": 1e6 * sum(host) / steps / sequences,
        "host_us_of_step_median": 1e6 * statistics.median(host),
        "host_us_of_step_least": 1e6 * min(host),
        "host_us_of_step_most": 1e6 * max(host),
        "step_s": statistics.median(wall),
        "host_share": sum(host) / sum(wall),
        "uncovered_share": max(0.0, 1 - sum(launch) / sum(wall)),
    }


def share(steps: int) -> dict[str, dict[str, float]]:
    with LLM("smollm2-135m", backend="cpu", weights="bf16", max_num_seqs=64, max_context=1024) as llm:
        return {"ids": measure(llm, 64, steps, (150, 250)), "text": measure(llm, 64, steps, (150, 250), reading=True)}


def flat(sequences: int, steps: int, runs: int) -> dict[str, Any]:
    """Measure decode `runs` times. Return the run with the median host time per token, and the time of each run."""
    with LLM(
        TINY, backend="null", max_num_seqs=sequences, max_num_batched_tokens=max(512, sequences), threads=1
    ) as llm:
        made = [measure(llm, sequences, steps, (33, 160)) for _ in range(runs)]
    made.sort(key=lambda run: run["host_us_per_token"])
    each = [run["host_us_per_token"] for run in made]
    return {"sequences": sequences, "runs_host_us_per_token": each} | made[runs // 2]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each run (default 200)")
    parser.add_argument(
        "--runs", type=int, default=5, help="runs on the null backend, which does not compute (default 5)"
    )
    parser.add_argument("--only-null", action="store_true", help="skip the runs of SmolLM2 on the CPU backend")
    args = parser.parse_args()
    result: dict[str, Any] = {} if args.only_null else {"share": share(args.steps)}
    result["flat"] = [flat(sequences, args.steps, args.runs) for sequences in (1, 64, 1024, 4096)]
    print(text(result))
    write(args.output, result)


if __name__ == "__main__":
    main()
