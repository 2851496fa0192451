"""Simulates clusters of two SMs, where each SM loads half of a weight tile and multicasts it to the other one.

    python benchmarks/calibration/pairs.py -o benchmarks/results/pairs.json

Such clusters are not implemented. A pair is simulated as one worker with twice the resources and tiles of twice the
rows: it loads a weight tile once for two row blocks, each of its loaders requests half of the weight pages and its own
rows, and it continues when both halves can. The last column is an upper bound for the gain, without waits between the
two SMs: the machine with 1.5 times the L2 bandwidth, because two tiles of 128 x 256 that share their weights load a
third less.
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


def paired(machine: Machine) -> Machine:
    """`machine` with each pair of workers replaced by one worker of twice the size."""
    assert machine.issue
    issue = replace(machine.issue, tile_page=machine.issue.tile_page / 2, pass_page=machine.issue.pass_page / 2)
    return replace(
        machine,
        workers=machine.workers // 2,
        tile_rows=2 * machine.tile_rows,
        ring_pages=2 * machine.ring_pages,
        worker_bytes_per_s=2 * machine.worker_bytes_per_s,
        issue=issue,
    )


def step_s(machine: Machine, rows: int, tp: int) -> float:
    program = compile_program(
        load_config("random:llama-3.1-70b"),
        machine,
        dtype=Dtype.BF16,
        tokens=rows,
        logit_rows=_LOGIT_ROWS,
        max_seqs=rows,
        max_context=_CONTEXT,
        tp=tp,
        options=Options(o="replicated", queue="body"),
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
        alone, pairs, bound = (step_s(machine, rows, 8) for machine in (h100, paired(h100), fast_l2))
        found.append({"rows": rows, "alone_s": alone, "pairs_s": pairs, "bound_s": bound, "gain": alone / pairs - 1})
        print(
            f"{rows:>5} rows: alone {alone * 1e3:7.2f} ms, pairs {pairs * 1e3:7.2f} ({alone / pairs - 1:+.1%}), bound"
            f" {bound * 1e3:7.2f}"
        )
        write(arguments.output, {"steps": found})


if __name__ == "__main__":
    main()
