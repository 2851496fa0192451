"""Measures the time and memory to compile and verify Llama-3.1-70B for different numbers of tokens, layers and GPUs.

    python benchmarks/speed/compile_verify.py -o benchmarks/results/compile-verify-70b.json

Each run has its own process, because peak memory is measured per process. The table shows medians of several runs.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import compiled

from megakernel import machine as machines
from megakernel.model import load_config
from megakernel.scheduler.verify import verify

TOKENS, LAYERS, RANKS = 8192, 80, 8
SHAPES = [
    *((tokens, LAYERS, RANKS) for tokens in (1, 64, 512, 1024, 2048, 4096, 8192)),
    *((TOKENS, layers, RANKS) for layers in (1, 2, 20, 40)),
    *((TOKENS, LAYERS, ranks) for ranks in (1, 2, 4)),
]


def measure(shape: tuple[int, int, int]) -> dict[str, Any]:
    tokens, layers, ranks = shape
    config = replace(load_config("random:llama-3.1-70b"), layers=layers)
    begin = time.perf_counter()
    program = compiled(config, machines.load("h100"), tokens, context=8192, seqs=min(tokens, 1024), tp=ranks)
    middle = time.perf_counter()
    report = verify(program)
    end = time.perf_counter()
    if not report.ok:
        raise SystemExit(f"{shape}: {report.violations[0]}")
    return {
        "tokens": tokens,
        "layers": layers,
        "ranks": ranks,
        "instructions": program.instructions,
        "bytes": len(program.to_bytes()),
        "compile_s": middle - begin,
        "verify_s": end - middle,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print("| tokens | layers | ranks | instructions | file | compile | verify | peak memory |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for shape in SHAPES:
        # The pool starts a new process for each run, so that no run inherits the peak memory of another.
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            runs = [pool.apply(measure, (shape,)) for _ in range(arguments.repeat)]
        rows.append({"runs": runs} | {k: statistics.median(r[k] for r in runs) for k in runs[0]})
        row = rows[-1]
        print(
            f"| {row['tokens']:,} | {row['layers']} | {row['ranks']} | {row['instructions']:,} "
            f"| {row['bytes'] / 1e6:.2f} MB | {row['compile_s']:.2f} s | {row['verify_s']:.2f} s "
            f"| {row['peak_bytes'] / 2**20:.0f} MiB |",
            flush=True,
        )
    write(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
