"""Measures the perplexity of a text: with quantised weights multiplied in integers and in floats, with weights widened
to float32, and in llama.cpp.

    python benchmarks/correctness/perplexity.py --llama-perplexity llama/build/bin/llama-perplexity -o FILE

The text is the beginning of the Constitution of the United States. As in llama.cpp's `llama-perplexity`, the tokens are
cut into chunks, and each chunk is computed alone. If the model has a token for the beginning of a text, this token
replaces the first token of each chunk. Only the tokens of the second half of a chunk are scored, except the first token
of this half. The script fails if widening the weights, or integers, change the perplexity by more than 0.1 %. If the
runs in floats have the same compute type, no bit should differ between them.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write

from megakernel import LLM, SamplingParams
from megakernel.model import gguf_path
from megakernel.settings import positive

TEXT = Path(__file__).with_name("constitution.txt")
CHUNK = 512
MOST_DIFFERENCE = 1e-3  # maximum relative change of the perplexity if weights are widened or activations are rounded


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--chunks", type=positive, metavar="N", help=f"number of {CHUNK}-token chunks (default: all)")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PATH", help="compare with this program of llama.cpp")
    args = parser.parse_args()
    file = gguf_path(args.model)
    if args.llama_perplexity and file is None:
        parser.error(f"--llama-perplexity needs a GGUF file, which {args.model} is not")
    stored, about = scores(args.model, "auto", "auto", args.chunks)
    floats, _ = scores(args.model, "auto", "float", args.chunks)
    widened, _ = scores(args.model, "f32", "auto", args.chunks)
    ours, plain, same = perplexity(stored), perplexity(floats), perplexity(widened)
    ok = abs(plain / same - 1) <= MOST_DIFFERENCE and abs(ours / plain - 1) <= MOST_DIFFERENCE
    figures = {
        "ok": ok,
        "model": about,
        "text": TEXT.name,
        "chunk_tokens": CHUNK,
        "chunks": len(stored),
        "scored_tokens": stored.size,
        "perplexity": ours,
        "perplexity_float_activations": plain,
        "perplexity_f32_weights": same,
        "same_bits": bool((floats == widened).all()),
        "logprob_difference": {"mean": (floats - stored).mean(), "standard_deviation": (floats - stored).std()},
        "perplexity_up_to_chunk": [perplexity(stored[: i + 1]) for i in range(len(stored))],
    }
    if args.llama_perplexity and file:
        figures["llama_cpp"] = llama_cpp(args.llama_perplexity, file, len(stored))
    for name, value in figures.items():
        print(f"{name}: {value}")
    write(args.output, figures)
    return 0 if ok else 1


def scores(
    model: str, weights: str, activations: str, chunks: int | None
) -> tuple[NDArray[np.float64], dict[str, str | int]]:
    """Return the log-probabilities of the scored tokens, one row per chunk of the text, and a description of the
    engine."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(
        model, weights=weights, activations=activations, max_context=CHUNK + 1, enable_prefix_caching=False
    ) as llm:
        ids, begin = llm.encode(TEXT.read_text()), llm.encode("")
        found = []
        for start in range(0, len(ids) - CHUNK + 1, CHUNK)[:chunks]:
            [result] = llm.generate([begin + ids[start + len(begin) : start + CHUNK]], params)
            assert result.prompt_token_logprobs is not None
            found.append([p for p in result.prompt_token_logprobs[CHUNK // 2 + 1 :] if p is not None])
        return np.array(found), llm.about


def perplexity(logprobs: NDArray[np.float64]) -> float:
    return math.exp(-logprobs.mean())


def llama_cpp(program: Path, model: Path, chunks: int) -> dict[str, object]:
    """Return llama.cpp's perplexity for the same model file, text and chunks, and llama.cpp's version."""
    command = [str(program), "-m", str(model), "-f", str(TEXT), "-c", str(CHUNK), "--chunks", str(chunks)]
    version = run([str(program), "--version"])
    said = run(command)
    rows = re.findall(r"\[\d+\](\d+\.\d+),", said)
    if len(rows) != chunks:
        raise SystemExit(f"{program} printed {len(rows)} chunks instead of {chunks}: {said[-300:]}")
    up_to = [float(row) for row in rows]
    return {"version": version.splitlines()[0], "perplexity": up_to[-1], "perplexity_up_to_chunk": up_to}


def run(command: list[str]) -> str:
    """Run a program and return all that it prints."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as e:
        raise SystemExit(f"cannot run {command[0]}: {e.strerror}") from e
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stdout[-300:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
