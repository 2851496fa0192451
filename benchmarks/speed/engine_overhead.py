"""What the engine costs beside the launches: `python benchmarks/speed/engine_overhead.py [-o FILE]`, one JSON.

Everything that the host does for a step (planning, building the table, reading back, detokenising) runs in one thread;
its processor time is the cost, whether it lies under a launch or between two.

share     SmolLM2-135M on the CPU backend, 64 sequences that decode: host seconds of a step, and the part of a step's
          wall time that no launch covers
flat      a tiny model on the null backend, 64 to 2,048 sequences that decode: host microseconds per token. No text:
          a tiny model has no tokenizer
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

TINY = RandomCheckpoint(
    "tiny",
    ModelConfig(vocab=512, hidden=64, ffn=128, layers=1, heads=4, kv_heads=2, head_dim=16, max_context=2048),
    0,
)


def measure(llm: LLM, sequences: int, steps: int, prompt: int, params: SamplingParams) -> dict[str, Any]:
    """Decode `steps` steps of `sequences` sequences, with prompts of `prompt` random tokens each computed before."""
    engine, rng = llm.engine, random.Random(0)
    vocab = engine.dims.vocab
    transcripts = {
        engine.add([rng.randrange(3, vocab) for _ in range(prompt)], params): llm.transcripts(params)
        for _ in range(sequences)
    }

    def step() -> float:
        done = engine.step()
        for token in done.tokens:
            transcripts[token.request][token.choice].add(token)
        return done.output.seconds

    while any(request.choices[0].outputs < 2 for request in transcripts):
        step()
    host, wall, launch = [], [], []
    for _ in range(steps):
        host_at, wall_at = time.thread_time(), time.perf_counter()
        launch.append(step())
        host.append(time.thread_time() - host_at)
        wall.append(time.perf_counter() - wall_at)
    for request in transcripts:
        engine.abort(request)
    return {
        "sequences": sequences,
        "host_s": statistics.median(host),
        "step_s": statistics.median(wall),
        "host_share": sum(host) / sum(wall),
        "uncovered_share": max(0.0, 1 - sum(launch) / sum(wall)),
        "host_us_per_token": 1e6 * sum(host) / steps / sequences,
        "host_s_of_steps": host,
        "step_s_of_steps": wall,
        "launch_s_of_steps": launch,
    }


def share(steps: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)
    with LLM("smollm2-135m", backend="cpu", weights="bf16", max_seqs=64, max_context=1024) as llm:
        return measure(llm, 64, steps, 200, params)


def flat(steps: int) -> list[dict[str, Any]]:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)
    found = []
    for sequences in (64, 128, 256, 512, 1024, 2048):
        with LLM(TINY, backend="null", max_seqs=sequences, step_tokens=max(512, sequences), threads=1) as llm:
            found.append(measure(llm, sequences, steps, 64, params))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps of each measurement (default 50)")
    args = parser.parse_args()
    result = {"share": share(args.steps), "flat": flat(args.steps)}
    print(text(result))
    write(args.output, result)


if __name__ == "__main__":
    main()
