"""Compares the tokens of 2, 4 and 8 ranks with those of one rank. The model is SmolLM2 in float32 with greedy sampling;
ranks are threads or processes.

python benchmarks/correctness/ranks.py -o benchmarks/results/ranks.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write

from megakernel import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time, in a small village,", list(range(100, 180))]
TOKENS = 24
SPLITS = ((1, "threads"), (2, "threads"), (4, "threads"), (8, "threads"), (2, "processes"), (4, "processes"))


def main() -> None:
    arguments = options(__doc__).parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    runs = {}
    for tp, ranks in SPLITS:
        limits = {"max_context": 256, "max_seqs": 4, "prefix_cache": False}
        with LLM("smollm2-135m", tp=tp, dtype="f32", ranks=ranks, **limits) as llm:
            runs[tp, ranks] = [llm.generate(PROMPTS, params) for _ in range(2)]
    rows = []
    for (tp, ranks), (first, again) in runs.items():
        logprobs = np.array([r.logprobs for r in first])
        one, threads = (np.array([r.logprobs for r in runs[key][0]]) for key in ((1, "threads"), (tp, "threads")))
        rows.append(
            {
                "tp": tp,
                "ranks": ranks,
                "tokens_equal_tp_1": [r.token_ids for r in first] == [r.token_ids for r in runs[1, "threads"][0]],
                "logprob_error": float(abs(logprobs - one).max()),
                "bits_equal_threads": bool((logprobs == threads).all()),
                "bits_equal_again": [r.logprobs for r in first] == [r.logprobs for r in again],
            }
        )
        print(rows[-1])
    write(arguments.output, {"prompts": len(PROMPTS), "tokens": TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
