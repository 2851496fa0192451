"""Simulates how much faster a step is if SMs work in pairs: each SM of a pair loads half of a weight tile and
multicasts this half to both SMs.

    python benchmarks/calibration/pairs.py -o benchmarks/results/pairs.json

The programs are compiled with `--pairs on` and `--pairs off`. The last column is the time that a step would take if the
two SMs of a pair never waited for each other. This time comes from a simulation of single SMs whose L2 has 1.5 times
the rate: two tiles of 128 x 256 that share their weights load a third less.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.machine import Machine
from megakernel.model import load_config
from megakernel.scheduler import Options, compile_program
from megakernel.scheduler.tune.predict import predicted_seconds

_LOGIT_ROWS, _CONTEXT, _LESS_L2 = 64, 128, 1.5


def step_s(machine: Machine, rows: int, tp: int, pairs: str) -> float:
    program = compile_program(
        load_config("random:llama-3.1-70b"),
        machine,
        dtype=Dtype.BF16,
        tokens=rows,
        logit_rows=_LOGIT_ROWS,
        max_seqs=rows,
        max_context=_CONTEXT,
        tp=tp,
        options=Options(o="replicated", queue="body", matmul="tensor", pairs=pairs),
    )
    return predicted_seconds(program, machine)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    arguments = parser.parse_args()
    h100 = machines.load("h100")
    fast_l2 = replace(h100, cache_bytes_per_s=_LESS_L2 * h100.cache_bytes_per_s)
    found: list[dict[str, Any]] = []
    for rows in arguments.rows:
        alone, pairs, bound = (
            step_s(machine, rows, 8, how) for machine, how in ((h100, "off"), (h100, "on"), (fast_l2, "off"))
        )
        found.append({"rows": rows, "alone_s": alone, "pairs_s": pairs, "bound_s": bound, "gain": alone / pairs - 1})
        print(
            f"{rows:>5} rows: alone {alone * 1e3:7.2f} ms, pairs {pairs * 1e3:7.2f} ({alone / pairs - 1:+.1%}), bound"
            f" {bound * 1e3:7.2f}"
        )
        write(arguments.output, {"steps": found})


if __name__ == "__main__":
    main()
