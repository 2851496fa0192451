"""Predicts what one H100 has measured, and publishes the errors: the examination of the simulator.

    python benchmarks/calibration/silicon.py -o benchmarks/results/silicon.json

The measured figures are in benchmarks/results/gpu-h100.json. `figures` has a prediction for each, of the program that
was measured, with the compiler options and the machine code of that day (benchmarks/machines/h100-measured.toml);
`today` has the predictions for today's (`memory_bytes`: of its large step). `variants` has predictions of the measured
program without early loads (`--no-pipelining`; measured: `not_pipelined` of decode-1b), and with times of k steps that
do not vary. No constant of the simulator was fitted to the time of a step. The hand-off while it is idle comes from the
published latency of the L2 cache; under load, it waits for the bytes that the probe's other SMs have asked for.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import options, write
from steps import compiled

from megakernel import machine as machines
from megakernel.isa import Dtype, StepTable
from megakernel.machine import Machine
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.scheduler import Options, Spec
from megakernel.scheduler.simulate import Simulation, simulate
from megakernel.scheduler.simulate.costs import HAND_OFF_TRIPS, costs_of
from megakernel.scheduler.tune import Fastest
from megakernel.targets.launch import PAGES

MEASURED = Path(__file__).parents[1] / "results" / "gpu-h100.json"
ABLATIONS = {"whole": "", "unsynchronised": "waits", "no copies": "copies", "no compute": "compute"}
VARIANTS = {"1B, one sequence": "early loads", "8B, 8,192 tokens": "variation"}
CODE = Path(__file__).parents[1] / "machines" / "h100-measured.toml"  # paths of the machine code that was measured
MIXED = 15, 512, 512, 512  # prompts, tokens of each, decode rows, KV tokens of each: as in benchmarks/speed/gpu.py
KV_TOKENS = 33  # of the decode step that the file's table `tuning` measured
# The bytes that each SM of the probe has asked for: 1,024 threads with eight loads of 16 bytes each.
PROBE_BYTES, PROBE_SMS = 1024 * 8 * 16, 130


class Case:
    """A program that was measured. `chosen` has the options of that day; without them, the compiler chooses now."""

    def __init__(self, model: str, machine: Machine, tokens: int, seqs: int, context: int, chosen: Options) -> None:
        self.name, self.machine, self.tokens, self.seqs = model, machine, tokens, seqs
        self.config, self.context, self.chosen = load_config(f"random:{model}"), context, chosen

    def today(self) -> Options:
        spec = Spec(self.config, self.machine, Dtype.BF16, self.tokens, self.seqs, self.seqs, self.context)
        return Fastest(spec).options(self.tokens)

    def predict(self, chosen: Options, what: str) -> Simulation:
        # No panel of that day was larger than another because of the L2 cache.
        machine = replace(self.machine, cache_bytes=1.0) if chosen is self.chosen else self.machine
        sizes, costs = {"context": self.context, "seqs": self.seqs, "options": chosen}, costs_of(self.machine)
        program = compiled(self.config, machine, self.tokens, **sizes)
        if chosen is self.chosen:  # no build for one row; matrix units held two of the 4 1/3 k steps in the ring
            costs = replace(costs, window_bytes=costs.ring_bytes, ahead_bytes=0.0, ahead_steps=7 / 3)
            program = replace(program, dims=program.dims.changed(ring_pages=PAGES))
        if what == "early loads":
            costs = costs.unpipelined()
        elif what == "variation":
            costs = replace(costs, ahead_steps=1e9)
        elif what:
            costs = costs.without(what)
        return simulate(program, self.machine, self.table(program), costs=costs)

    def table(self, program: Program) -> StepTable:
        per = program.dims.bucket.pages_per_seq
        if self.tokens == 1:
            return build_step(program.dims, [Chunk(0, KV_TOKENS - 1, [0], range(per), [SampleRow(0)])])
        prompts, rows, decodes, context = MIXED
        chunks = []
        for i in range(decodes + prompts):
            many, pages = (1 if i < decodes else rows), range(i * per, (i + 1) * per)
            chunks.append(Chunk(i, context - many, [0] * many, pages, [SampleRow(many - 1)]))
        return build_step(program.dims, chunks)


def cases(machine: Machine) -> dict[str, Case]:
    rows = MIXED[0] * MIXED[1] + MIXED[2]
    few = Options(queue="none", matmul="dots")
    many = Options(queue="body", norm="own", matmul="tensor", interleave=False)
    return {
        "1B, one sequence": Case("llama-3.2-1b", machine, 1, 1, 1024, few),
        "8B, one sequence": Case("llama-3.1-8b", machine, 1, 1, 1024, few),
        "8B, 8,192 tokens": Case("llama-3.1-8b", machine, rows, MIXED[0] + MIXED[2], MIXED[3], many),
    }


def measured() -> dict[str, float]:
    """Return the measured seconds of each figure."""
    record = json.loads(MEASURED.read_text())
    tuning = {row["name"]: row for row in record["tuning"] if row["run"] == 4}
    hand_off = record["before"]["probe"][0]["hand_off"]
    found = {"hand-off, idle": hand_off["idle"]["median_s"]}
    found["hand-off, under load"] = hand_off["under_memory_load"]["median_s"]
    for name in ABLATIONS:
        found[f"1B, one sequence: {name}"] = tuning["kept"][f"{name.replace(' ', '_')}_us"] * 1e-6
    found["8B, one sequence: whole"] = tuning["kept, 8B"]["whole_us"] * 1e-6
    mixed = record["after"]["ablate-mixed-8b"][0]
    for name in ABLATIONS:
        found[f"8B, 8,192 tokens: {name}"] = mixed[name.replace(" ", "_")]["kernel_s"]
    return found


def predicted(machine: Machine, today: bool) -> dict[str, float]:
    costs, idle = costs_of(machine), HAND_OFF_TRIPS * (machine.paths or {})["l2_trip"].warm
    found = {"hand-off, idle": idle, "hand-off, under load": idle + PROBE_SMS * PROBE_BYTES / costs.memory_bytes_per_s}
    for name, case in cases(machine).items():
        chosen = case.today() if today else case.chosen
        for what, left_out in ABLATIONS.items():
            if name.startswith("8B, one") and left_out:
                continue
            found[f"{name}: {what}"] = case.predict(chosen, left_out).step_s
    return found


def main() -> None:
    arguments = options(__doc__).parse_args()
    seconds = measured()
    figures, today = predicted(machines.load(str(CODE)), today=False), predicted(machines.load("h100"), today=True)
    rows: list[dict[str, Any]] = []
    for name, at in seconds.items():
        rows.append({"name": name, "measured_s": at, "predicted_s": figures[name]})
        print(f"{name:32} measured {at * 1e6:12,.2f} us, predicted {figures[name] * 1e6:12,.2f} us", end="")
        print(f" ({figures[name] / at - 1:+.1%}); today {today[name] * 1e6:,.2f} us")
    measured_cases, variants = cases(machines.load(str(CODE))), dict[str, float]()
    for name, what in VARIANTS.items():
        seconds_without = measured_cases[name].predict(measured_cases[name].chosen, what).step_s
        variants[f"{name}, without {what}"] = seconds_without
        print(f"{name}, without {what}: {seconds_without / figures[f'{name}: whole'] - 1:+.1%}")
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    print(f"largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")
    others = {"today": today, "variants": variants}
    more = {key: [{"name": n, "predicted_s": s} for n, s in found.items()] for key, found in others.items()}
    large = cases(machines.load("h100"))["8B, 8,192 tokens"]
    write(arguments.output, {"figures": rows, "memory_bytes": large.predict(large.today(), "").memory_bytes} | more)


if __name__ == "__main__":
    main()
