"""Measures what rounding activations changes, in megakernel and in llama.cpp.

    python benchmarks/correctness/rounding.py --questions mt_bench_question.jsonl --llama DIR -o FILE

Both programs round the inputs of quantised weights. Each is compared with itself without rounding: megakernel with
`--activations float`, and llama.cpp with the same weights in a float32 file. There are two figures:

* the KL divergence of the next token's distribution, over the second halves of the chunks that perplexity.py scores
* for each question of MT-bench (its first turn), the number of tokens of a greedy answer up to the first that differs

DIR has llama.cpp's programs llama-perplexity and llama-simple. For its answers, tokens are counted in the text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from perplexity import CHUNK, TEXT, run

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write

from megakernel import LLM, SamplingParams
from megakernel.isa import Dtype
from megakernel.model import gguf_path, open_checkpoint
from megakernel.model.gguf_writer import write_gguf
from megakernel.runtime import Chunk, SampleRow, build_step

KINDS = ("float", "q8")
TOKENS = 64  # maximum length of an answer


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a model with a GGUF file (default: smollm2-135m)")
    parser.add_argument("--questions", type=Path, required=True, help="MT-bench's file of questions")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="also measure llama.cpp, with the programs in DIR")
    args = parser.parse_args()
    questions = [json.loads(line)["turns"][0] for line in args.questions.read_text().splitlines()]
    logits, answers = [], []
    for activations in KINDS:
        with LLM(args.model, activations=activations, max_context=2048, max_num_seqs=CHUNK // 2) as llm:
            logits.append(chunk_logits(llm))
            prompts = [llm.chat_ids([{"role": "user", "content": question}]) for question in questions]
            greedy = SamplingParams(max_tokens=TOKENS, temperature=0)
            answers.append([result.token_ids for result in llm.generate(prompts, greedy)])
            encode, texts = llm.encode, [llm.tokenizer.decode(prompt) for prompt in prompts if llm.tokenizer]
    figures: dict[str, Any] = {
        "model": args.model,
        "megakernel": divergence(*logits) | first_differences(*answers),
    }
    file = gguf_path(args.model)
    if args.llama and file:
        with TemporaryDirectory() as folder:
            whole = Path(folder) / "f32.gguf"
            write_gguf(open_checkpoint(args.model), whole, Dtype.F32, tokenizer=file)
            texts = [[answer(args.llama, model, text) for text in texts] for model in (whole, file)]
            same = first_differences(*([encode(text) for text in each] for each in texts))
            figures["llama.cpp"] = llama_divergence(args.llama, whole, file) | same
    for name, value in figures.items():
        print(f"{name}: {value}")
    write(args.output, figures)


def chunk_logits(llm: LLM) -> NDArray[np.float32]:
    """Return the logits of the second half of each chunk of the text: [chunks * CHUNK / 2, vocab]."""
    engine, ids = llm.engine, llm.encode(TEXT.read_text())
    program, half = engine.programs.get(CHUNK, CHUNK // 2), CHUNK // 2
    pages = list(range(program.dims.bucket.pages_per_seq))
    found = []
    for start in range(0, len(ids) - CHUNK + 1, CHUNK):
        rows = [SampleRow(i, store=False) for i in range(half, CHUNK)]
        table = build_step(program.dims, [Chunk(0, 0, ids[start : start + CHUNK], pages, rows)])
        found.append(engine.backend.launch(program, table).logits[:half].copy())
    return np.concatenate(found)


def divergence(exact: NDArray[np.float32], rounded: NDArray[np.float32]) -> dict[str, float]:
    """Return the mean KL divergence, and how often both distributions have the same most probable token."""
    p, q = (log_softmax(each.astype(np.float64)) for each in (exact, rounded))
    return {
        "kl_divergence": float((np.exp(p) * (p - q)).sum(1).mean()),
        "same_top_token": float((p.argmax(1) == q.argmax(1)).mean()),
    }


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log-probabilities of rows of logits."""
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def first_differences(exact: Sequence[Sequence[int]], rounded: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return how many tokens at the beginning of each pair of answers are the same."""
    same = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        for a, b in zip(exact, rounded, strict=True)
    ]
    equal = sum(list(a) == list(b) for a, b in zip(exact, rounded, strict=True))
    return {"equal_answers": equal, "answers": len(same), "median_same_tokens": median(same), "same_tokens": same}


def answer(programs: Path, model: Path, prompt: str) -> str:
    """Return the text of llama.cpp's greedy answer."""
    said = run([str(programs / "llama-simple"), "-m", str(model), "-n", str(TOKENS), prompt])
    _, _, text = said.partition(prompt)
    return text.partition("main: decoded")[0].rstrip("\n")  # what follows is a report on stderr


def llama_divergence(programs: Path, exact: Path, rounded: Path) -> dict[str, float]:
    """Return the same figures as `divergence`, as llama-perplexity computes them."""
    with TemporaryDirectory() as folder:
        common = [str(programs / "llama-perplexity"), "-f", str(TEXT), "-c", str(CHUNK)]
        logits = ["--kl-divergence-base", str(Path(folder) / "logits")]
        run([*common, "-m", str(exact), *logits])
        said = run([*common, "-m", str(rounded), *logits, "--kl-divergence"])
    found = {
        name: re.search(rf"{label}\s*:\s*(-?[0-9.]+)", said)
        for name, label in (("kl_divergence", "Mean +KLD"), ("same_top_token", "Same top p"))
    }
    if not all(found.values()):
        raise SystemExit(f"llama-perplexity printed no divergence: {said[-300:]}")
    kl, top = (float(match[1]) for match in found.values() if match)
    return {"kl_divergence": kl, "same_top_token": top / 100}


if __name__ == "__main__":
    main()
