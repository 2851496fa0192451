"""Compares predicted and measured steps of this machine.

    python benchmarks/calibration/predictions_host.py --machine FILE.toml -o benchmarks/results/predictions-host.json

The script runs SmolLM2-135M's and Llama-3.2-1B's shapes with random weights: prefill and decode, with one worker and
with one worker per core. FILE.toml is written on this machine by calibrate.py, which measures another shape and keeps
the best of several undisturbed runs. So a prediction is compared with the fastest launch. The output also has the
median, which includes the disturbances of a shared machine, and the least time that the machine's ceilings allow. The
cases take turns, so that a disturbance affects all of them.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import backend, compiled

from megakernel import machine as machines
from megakernel.isa import StepTable
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.roofline import bound, machine_ceilings, step_work
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.scheduler.simulate import Simulation, simulate

PROMPT = 512
MODELS = ("smollm2-135m", "random:llama-3.2-1b")
TURN_S = 2.0


@dataclass
class Case:
    """A predicted step, and the times of its launches. `backend` is None if the step is only predicted."""

    model: str
    phase: str
    workers: int
    program: Program
    table: StepTable
    bound_s: float
    predicted: Simulation
    backend: Any
    runs_s: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Launch repeatedly for TURN_S seconds, and at least once."""
        stop = perf_counter() + TURN_S
        while True:
            begin = perf_counter()
            self.backend.launch(self.program, self.table)
            end = perf_counter()
            self.runs_s.append(round(end - begin, 6))
            if end > stop:
                return

    def row(self) -> dict[str, Any]:
        p = self.predicted
        row: dict[str, Any] = {"model": self.model, "phase": self.phase, "workers": self.workers}
        row |= {"bound_s": self.bound_s, "predicted_s": p.step_s}
        if self.runs_s:
            fastest, median = min(self.runs_s), statistics.median(self.runs_s)
            row |= {"fastest_s": fastest, "error": p.step_s / fastest - 1}
            row |= {"median_s": median, "error_of_median": p.step_s / median - 1, "runs_s": self.runs_s}
        return row


def cases(model: str, workers: int, file: str, measured: bool) -> list[Case]:
    """Return the cases of one model with `workers` workers. All measured cases share one backend.

    Predictions and measurements use the same programs, compiled for this machine.
    """
    config, machine, cpu, found = load_config(model), machines.load(file, workers), None, []
    ceilings = machine_ceilings(machine)
    for phase, tokens, start in (("decode", 1, PROMPT), ("prefill", PROMPT, 0)):
        program = compiled(config, machines.host(workers), tokens, context=2 * PROMPT)
        work = step_work(program.forward, program.dims.split, [tokens], [start + tokens], 1, tied=config.tied)
        pages = range(program.dims.bucket.pages_per_seq)
        table = build_step(program.dims, [Chunk(0, start, [1] * tokens, pages, [SampleRow(tokens - 1)])])
        if measured and cpu is None:
            cpu = backend("cpu", config, program.dims, threads=workers)
        least, step = bound(work, ceilings), simulate(program, machine, table)
        found.append(Case(model, phase, workers, program, table, least, step, cpu))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--machine", metavar="FILE.toml", required=True)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--seconds", type=float, default=600.0, help="total seconds to measure (default: 600)")
    parser.add_argument("--predict-only", action="store_true")
    arguments = parser.parse_args()
    all_cases = [
        case
        for model in arguments.models
        for workers in sorted({1, machines.cpu_count()})
        for case in cases(model, workers, arguments.machine, not arguments.predict_only)
    ]
    if not arguments.predict_only:
        for case in all_cases:
            case.backend.launch(case.program, case.table)
        stop = perf_counter() + arguments.seconds
        while perf_counter() < stop:
            for case in all_cases:
                case.turn()
    rows = [case.row() for case in all_cases]
    for row in rows:
        line = f"{row['model']} {row['phase']} {row['workers']} workers: at least {row['bound_s'] * 1e3:.2f} ms,"
        line += f" predicted {row['predicted_s'] * 1e3:.2f} ms"
        if "fastest_s" in row:
            line += f", fastest {row['fastest_s'] * 1e3:.2f} ms, error {row['error']:+.1%}"
            line += f"; median {row['median_s'] * 1e3:.2f} ms, {row['error_of_median']:+.1%}; {len(row['runs_s'])} runs"
        print(line)
    write(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
