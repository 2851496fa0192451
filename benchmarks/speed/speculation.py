"""Measures decode of one sequence with and without `--speculate N`, on three texts.

    python benchmarks/speed/speculation.py -o FILE

The text `repeats` is a passage that the model must copy from the prompt, greedily. The other two are sampled at
temperature 1: `does not repeat` is a story, and `false proposals` answers a prompt with a list of like lines, of which
nearly all proposed tokens are wrong. End-of-sequence tokens are ignored, so that every run generates the same number of
tokens. Two engines with the same weights take turns, A B A B, after one run of each that is not counted. A run's rate
is the number of tokens after the first, divided by the time from the first to the last. A text's ratio is the median
over all turns. Tokens and log-probabilities of all runs of a text must be bit-identical; otherwise the exit status is
1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, text, write

from megakernel import LLM, SamplingParams
from megakernel.serving import RequestOutput

# The beginning of Charles Dickens, A Tale of Two Cities, 1859.
PASSAGE = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season
of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before
us, we were all going direct to Heaven, we were all going direct the other way. There were a king with a large jaw and a
queen with a plain face, on the throne of England; there were a king with a large jaw and a queen with a fair face, on
the throne of France. In both countries it was clearer than crystal to the lords of the State preserves of loaves and
fishes, that things in general were settled for ever."""
LIST = "\n".join(f"Box {i} has {i * i % 97} apples and {i * 7 % 89} pears." for i in range(3, 23))
MORE = f"{LIST}\n\nWrite twenty more lines like these, with other numbers."
TEXTS = {
    "repeats": (f"Repeat the following passage word for word:\n\n{PASSAGE}", {"temperature": 0.0}),
    "false proposals": (MORE, {"temperature": 1.0, "seed": 2}),
    "does not repeat": ("Write a long story about a lighthouse keeper.", {"temperature": 1.0, "seed": 1}),
}


def run(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[dict[str, Any], RequestOutput]:
    """Continue a prompt. Return a dictionary of its speed and counts of speculation, and the generated text."""
    before = llm.engine.stats.counts
    result = llm.generate([ids], params)[0]
    [answer] = result.outputs
    assert answer.tpot_s is not None
    counts = llm.engine.stats.counts - before
    return {"tokens_per_s": 1 / answer.tpot_s, "ttft_s": answer.ttft_s, **counts.figures()}, result


def compare(sides: dict[str, LLM], prompt: str, params: SamplingParams, rounds: int) -> dict[str, Any]:
    """Run the engines in turn, and return all runs and the factor by which the engine with speculation is faster."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    results: list[RequestOutput] = []
    for round_ in range(rounds + 1):
        for name, llm in sides.items():
            ids = llm.chat_ids([{"role": "user", "content": prompt}])
            figures, result = run(llm, ids, params)
            results.append(result)
            if round_:
                runs[name].append(figures)
    rates = {name: median(figures["tokens_per_s"] for figures in found) for name, found in runs.items()}
    first = results[0]
    return {
        "prompt_tokens": len(first.prompt_token_ids),
        "tokens": len(first.token_ids),
        "tokens_per_s": rates,
        "ratio": median(b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(*runs.values(), strict=True)),
        "same_bits": all((r.token_ids, r.logprobs) == (first.token_ids, first.logprobs) for r in results),
        "runs": runs,
    }


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a model with a chat template (default smollm2-135m)")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="bf16", help="type of the weight matrices in memory (default bf16)")
    parser.add_argument("--speculate", type=int, default=7, help="tokens proposed at once (default 7)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens that each run generates (default 256)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each engine after a warm-up (default 5)")
    args = parser.parse_args()
    how: dict[str, Any] = {name: getattr(args, name) for name in ("backend", "dtype", "weights")}
    how |= {"max_context": 2048, "max_num_seqs": 1}
    found = {}
    with LLM(args.model, **how) as plain, LLM(args.model, **how, speculate=args.speculate) as speculating:
        for name, (prompt, sampling) in TEXTS.items():
            params = SamplingParams(**sampling, max_tokens=args.tokens, ignore_eos=True)
            found[name] = compare({"plain": plain, "speculate": speculating}, prompt, params, args.rounds)
        settings = plain.about | {"speculate": args.speculate, "tokens": args.tokens}
    figures = {"settings": settings, "texts": found}
    print(text(figures))
    write(args.output, figures)
    return 0 if all(one["same_bits"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
