"""Compares the CPU backend with llama.cpp on every kind of work: `python benchmarks/speed/cpu.py --llama-bench DIR -o
FILE`.

Each case is one call of `megakernel bench ... --vs llama.cpp --json`, in which both sides run in turn on the same
weights. llama.cpp runs with the fastest settings that a search finds. In one case, another process keeps one core busy
during the run. `--simd avx2` runs our side without AVX-512; DIR must then have a build of llama.cpp without AVX-512.
`--only TEXT` selects the case called TEXT, or else those whose names contain TEXT; other cases in FILE from an earlier
call are kept. Nothing else should run on the machine meanwhile. The shape of Qwen3-30B-A3B has four of its 48 layers,
because the whole model does not fit into the memory of a small machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import made, options, write
from servers import measured

RUNS = ["--runs", "5"]
SMALL, LARGE = ["--model", "smollm2-135m"], ["--model", "random:llama-3.2-1b", "--max-model-len", "2048"]
INTEGERS = ["--kv-cache-dtype", "q8_0"]
EXPERTS = "four layers of qwen3-30b-a3b in q4_k"  # stands for the file that `experts_file` writes
FEW = ["--tokens", "24"]  # option for fewer decode steps, for the larger model and for long contexts


def latency(model: list[str], weights: str, prompt: int, *more: str) -> list[str]:
    return ["bench", "latency", *model, "--weights", weights, "--prompt-tokens", str(prompt), *RUNS, *more]


def batch(weights: str) -> list[str]:
    sizes = ["--num-prompts", "32", "--max-num-seqs", "32", "--random-input-len", "512", "--random-output-len", "64"]
    return ["bench", "throughput", *SMALL, "--weights", weights, "--dataset", "random", *sizes, *RUNS]


CASES = {
    "smollm2 as in its file (Q4_1)": latency(SMALL, "auto", 256),
    "smollm2 bf16": latency(SMALL, "bf16", 256),
    "smollm2 q8_0": latency(SMALL, "q8_0", 256),
    "1B bf16": latency(LARGE, "bf16", 256, *FEW),
    "1B q8_0": latency(LARGE, "q8_0", 256, *FEW),
    "smollm2 bf16, 2048 rows": latency(SMALL, "bf16", 2048, *FEW),
    "smollm2 bf16, context 4096": latency(SMALL, "bf16", 4096, *FEW),
    "smollm2 q8_0, 2048 rows": latency(SMALL, "q8_0", 2048, *FEW),
    "smollm2 as in its file (Q4_1), 2048 rows": latency(SMALL, "auto", 2048, *FEW),
    "1B q4_k": latency(LARGE, "q4_k", 256, *FEW),
    "smollm2 bf16, context 8192": latency(SMALL, "bf16", 8192 - 32, *FEW),
    "smollm2 bf16, context 4096, q8_0 cache": latency(SMALL, "bf16", 4096, *FEW, *INTEGERS),
    "smollm2 bf16, context 8192, q8_0 cache": latency(SMALL, "bf16", 8192 - 32, *FEW, *INTEGERS),
    "smollm2 bf16, 32 sequences": batch("bf16"),
    "smollm2 as in its file (Q4_1), 32 sequences": batch("auto"),
    "smollm2 bf16, beside a busy process": latency(SMALL, "bf16", 256),
    "30B-A3B q4_k, 4 layers": latency(["--model", EXPERTS, "--max-model-len", "2048"], "auto", 256),
}


@contextmanager
def busy() -> Iterator[None]:
    """Run a process that uses as much of one core as it gets, until the `with` block ends."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def experts_file() -> Iterator[str]:
    """Write the model EXPERTS, with random weights, to a temporary GGUF file, and yield its path."""
    from megakernel.isa import Dtype
    from megakernel.model import KNOWN_SHAPES, RandomCheckpoint
    from megakernel.model.gguf_writer import write_gguf

    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        config = replace(KNOWN_SHAPES["qwen3-30b-a3b"], layers=4, normalised_routes=True)
        write_gguf(RandomCheckpoint(EXPERTS, config), path, Dtype.Q4_K)
        yield str(path)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="DIR", help="folder of a llama.cpp build")
    parser.add_argument(
        "--simd", help="SIMD path of megakernel, for example avx2 (default: the widest that this CPU supports)"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only the case TEXT, or those whose names contain it"
    )
    args = parser.parse_args()
    if args.simd:
        os.environ["MEGAKERNEL_SIMD"] = args.simd
    figures: dict[str, Any] = {}
    if args.output and args.output.exists():
        figures = json.loads(args.output.read_text())["cases"]
    for name in [args.only] if args.only in CASES else [name for name in CASES if args.only in name]:
        command = CASES[name]
        with (
            busy() if "busy" in name else nullcontext(),
            experts_file() if EXPERTS in command else nullcontext() as path,
        ):
            given = [path if part == EXPERTS else part for part in command]
            found = measured(*given, "--vs", "llama.cpp", "--llama-bench", str(args.llama_bench.resolve()))
            found["settings"]["model"] = command[command.index("--model") + 1]  # not the path of a temporary file
        [other] = found["vs"].values()
        ratios = {"ratio": other["ratio"], "prefill_ratio": other.get("prefill", {}).get("ratio")}
        figures[name] = {"recorded": made()["recorded"], "command": " ".join(command)} | ratios | {"result": found}
        print(f"{name}: {ratios}", file=sys.stderr)
        write(args.output, {"simd": args.simd or "best", "cases": figures})


if __name__ == "__main__":
    main()
