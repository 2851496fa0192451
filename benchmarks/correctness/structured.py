"""Validates answers to random JSON schemas: `python benchmarks/correctness/structured.py [-o FILE]`.

A grammar built from the schema makes each answer valid, so any model will do. Exit status 1 means that an answer is
invalid or did not end within `--tokens` tokens, or that a schema was refused.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import jsonschema
from record import options, text, write
from schemas import random_root

from megakernel import LLM, MegakernelError, SamplingParams, StructuredOutputsParams


def wrong(schema: dict[str, Any], answer: str, finish_reason: str) -> str:
    """Return what is wrong with an answer, or an empty string if it is valid."""
    if finish_reason != "stop":
        return f"ended with the reason {finish_reason}"
    try:
        jsonschema.validate(json.loads(answer), schema)
    except (ValueError, jsonschema.ValidationError) as e:
        return str(e).splitlines()[0]
    return ""


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=700, help="maximum tokens of an answer (default: 700)")
    args = parser.parse_args()
    rng = random.Random(0)
    schemas = [random_root(rng) for _ in range(args.schemas)]
    failures: list[dict[str, Any]] = []
    tokens = 0
    began = perf_counter()
    with LLM(args.model, max_context=1024, max_num_seqs=64) as llm:
        for first in range(0, len(schemas), 100):
            part = schemas[first : first + 100]
            each = [
                SamplingParams(
                    temperature=(0.0, 0.7, 1.5)[number % 3],
                    seed=number,
                    max_tokens=args.tokens,
                    structured_outputs=StructuredOutputsParams(json=schema),
                )
                for number, schema in enumerate(part)
            ]
            try:
                results = llm.generate(["Answer in JSON: "] * len(part), each)
            except MegakernelError as e:
                failures.append({"from": first, "wrong": str(e)})
                continue
            for schema, result in zip(part, results, strict=True):
                tokens += len(result.token_ids)
                if why := wrong(schema, result.text or "", result.finish_reason):
                    failures.append({"wrong": why, "schema": schema, "answer": result.text})
        about = llm.about
    figures = {"settings": about, "schemas": args.schemas, "tokens": tokens, "seconds": perf_counter() - began}
    figures |= {"valid": args.schemas - len(failures), "failures": failures}
    print(text(figures))
    write(args.output, figures)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
