"""Compares the compiler's default options with the fastest of all combinations, according to the simulator.

    python benchmarks/calibration/defaults.py -o benchmarks/results/defaults.json

For each model, machine, number of ranks and number of rows, the script predicts three steps: one with the default
options, which `Fastest` chooses; one without queues, in which the worker of each instruction is fixed at compile time;
and one with the fastest combination of options. Nothing is measured.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.model import load_config
from megakernel.scheduler import Options, Spec
from megakernel.scheduler.options import CHOICES
from megakernel.scheduler.tune import Fastest
from megakernel.scheduler.tune.fastest import Predictions

MODELS = "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"
_CONTEXT = 128
# Variants that are too slow to matter are left out: matmuls as dot products on CUDA cores with more than _MOST_DOTS
# rows, the whole residual on every rank with more than _MOST_REPLICATED rows, and no interleaving of operations with
# fewer than _LEAST_PANELS rows.
_MOST_DOTS, _MOST_REPLICATED, _LEAST_PANELS = 32, 1024, 512


def variants(tp: int, rows: int) -> list[Options]:
    """Return all combinations of compiler options to compare, including those that do not work together."""
    names = ["queue", "norm"] + ["o"] * (tp > 1) + ["residual"] * (tp > 1 and rows <= _MOST_REPLICATED)
    names += ["matmul"] * (rows <= _MOST_DOTS)
    values = [[value for value in CHOICES[name] if value != "auto"] for name in names]
    every = [Options(**dict(zip(names, chosen, strict=True))) for chosen in product(*values)]
    return every + [replace(o, interleave=False) for o in every if rows >= _LEAST_PANELS]


def point(model: str, machine: str, tp: int, rows: int) -> dict[str, Any]:
    config = load_config(f"random:{model}")
    fastest = Fastest(Spec(config, machines.load(machine), Dtype.BF16, rows, 1, rows, _CONTEXT, tp))
    begin = process_time()
    chosen = fastest.options(rows)
    spent, known = process_time() - begin, Predictions()
    default = fastest.seconds(chosen, rows, known)
    static = fastest.seconds(replace(Options(), queue="none"), rows, known)
    best, best_s = min(((o, fastest.seconds(o, rows, known)) for o in variants(tp, rows)), key=lambda pair: pair[1])
    return {
        "model": model,
        "machine": machine,
        "tp": tp,
        "rows": rows,
        "default_s": default,
        "static_s": static,
        "best_s": best_s,
        "loss": default / best_s - 1,
        "static_loss": static / best_s - 1,
        "chosen": vars(chosen),
        "best": vars(best),
        "choosing_s": spent,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--machines", nargs="*", default=["h100", "h200"])
    parser.add_argument("--models", nargs="*", default=MODELS)
    arguments = parser.parse_args()
    found = []
    for rows, machine, model, tp in product(arguments.rows, arguments.machines, arguments.models, arguments.tp):
        found.append(point(model, machine, tp, rows))
        row = found[-1]
        print(
            f"{machine} {model} tp {tp} {rows:>5} rows: default {row['default_s'] * 1e3:9.3f} ms, loses"
            f" {row['loss']:.1%}; static {row['static_loss']:.1%} [chosen in {row['choosing_s']:.1f} s]",
            flush=True,
        )
        write(arguments.output, {"points": found})


if __name__ == "__main__":
    main()
