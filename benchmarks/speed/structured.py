"""Measures how masks and forced tokens affect the speed of a batch: `python benchmarks/speed/structured.py -o FILE`.

32 sequences are continued by the same number of tokens, in five ways in turn, after a run that is not counted:

    free     unconstrained
    masked   text that matches a regular expression which forces nothing, so every token has a mask
    schema   a list of records with a JSON schema, whose names and punctuation are forced
    half     half of them free, half masked
    greedy   free, at temperature 0, for which the sampling instruction has a shorter path

A rate is the number of tokens after the first step that gave any, divided by the time since that step. `free_tpot_s` is
the mean time per token of a free sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median
from time import perf_counter, thread_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, text, write

from megakernel import LLM, SamplingParams, StructuredOutputsParams
from megakernel.serving.engine import Step

SEQUENCES = 32
_RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 99},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age_in_years", "favourite_colour"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _RECORD, "minItems": 1000}
_WORDS = "([A-Za-z,.]+ )+"


def params(kind: str, tokens: int, seed: int) -> SamplingParams:
    wanted = {"masked": {"regex": _WORDS}, "schema": {"json": _SCHEMA}}.get(kind)
    return SamplingParams(
        temperature=0.0 if kind == "greedy" else 1.0,
        seed=seed,
        max_tokens=tokens,
        ignore_eos=wanted is None,
        structured_outputs=StructuredOutputsParams(**wanted) if wanted else None,
    )


def run(llm: LLM, kind: str, tokens: int) -> dict[str, Any]:
    kinds = ["free", "masked"] * (SEQUENCES // 2) if kind == "half" else [kind] * SEQUENCES
    times: list[tuple[float, int]] = []
    launches: list[float] = []

    def note(step: Step) -> None:
        times.append((perf_counter(), len(step.tokens)))
        launches.append(step.output.seconds)

    each = [params(one, tokens, seed) for seed, one in enumerate(kinds)]
    prompts = [f"Write about the number {number}. " for number in range(SEQUENCES)]
    engine_s = thread_time()
    results = llm.generate(prompts, each, on_step=note)
    engine_s = thread_time() - engine_s
    begin = next(at for at, (_, made) in enumerate(times) if made)
    made = sum(count for _, count in times[begin + 1 :])
    found = {"tokens": made, "steps": len(times), "tokens_per_s": made / (times[-1][0] - times[begin][0])}
    free = [result.tpot_s for result, one in zip(results, kinds, strict=True) if one == "free" and result.tpot_s]
    found["launches_s"] = sum(launches[begin + 1 :])
    return found | {"host_us_per_token": engine_s / made * 1e6} | ({"free_tpot_s": mean(free)} if free else {})


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each sequence (default 96)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way, after one to warm up (default 3)")
    args = parser.parse_args()
    kinds = ("free", "masked", "schema", "half", "greedy")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with LLM(args.model, backend=args.backend, max_context=512, max_seqs=64) as llm:
        for number in range(args.rounds + 1):
            for kind in kinds:
                found = run(llm, kind, args.tokens)
                if number:
                    runs[kind].append(found)
        about = llm.about
    rates = {kind: median(one["tokens_per_s"] for one in found) for kind, found in runs.items()}
    tpot = {kind: median(one["free_tpot_s"] for one in runs[kind]) for kind in ("free", "half")}
    figures = {
        "settings": about | {"sequences": SEQUENCES, "tokens": args.tokens},
        "tokens_per_s": rates,
        "masked_to_free": rates["masked"] / rates["free"],
        "schema_to_free": rates["schema"] / rates["free"],
        "free_tpot_beside_masked_to_alone": tpot["half"] / tpot["free"],
        "runs": runs,
    }
    print(text(figures))
    write(args.output, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
