"""Measures how masks and forced tokens affect the speed of a batch: `python benchmarks/speed/structured.py -o FILE`.

A mask says which tokens may be sampled. A forced token is the only one that a grammar allows, so it is not sampled. The
script generates the same number of tokens for each of 32 sequences, in five ways in turn, after a warm-up run of each:

    free     unconstrained
    masked   a regular expression that forces no token, so every token is sampled with a mask
    schema   a JSON schema for a list of records, which forces the field names and the punctuation
    half     half of the sequences are free, and half are masked
    greedy   free, but at temperature 0, for which the sampling instruction has a shorter path

A rate is in tokens per second, counted from the end of the first step that generates tokens, without the tokens of
that step. `free_tpot_s` is the mean time per token of a free sequence.
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
from megakernel.serving.engine.engine import Step

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
    tpot = [result.outputs[0].tpot_s for result, one in zip(results, kinds, strict=True) if one == "free"]
    free = [seconds for seconds in tpot if seconds]
    found["launches_s"] = sum(launches[begin + 1 :])
    return found | {"host_us_per_token": engine_s / made * 1e6} | ({"free_tpot_s": mean(free)} if free else {})


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=96, help="tokens generated per sequence (default 96)")
    parser.add_argument("--rounds", type=int, default=3, help="measured runs of each kind, after a warm-up (default 3)")
    args = parser.parse_args()
    kinds = ("free", "masked", "schema", "half", "greedy")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with LLM(args.model, backend=args.backend, max_context=512, max_num_seqs=64) as llm:
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
