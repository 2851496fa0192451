"""Predicts which part of a step the interpreter's own work takes, and how many hand-offs stay on one SM.

    python benchmarks/calibration/interpreting.py -o benchmarks/results/interpreting.json

A kernel that computes one operation spends nothing on instructions of a program, on pages that several operations
share, or on counters. The script simulates a step as it is, and again with a machine on which parts of this work take
no time. The cycles come from the table [paths] of the machine file, so from compiled machine code (machine_code.py).

A hand-off means that an instruction waits for a counter that others signal. The wait could avoid the counter in global
memory if the others run on the same SM. So the script counts the waits for which this is true.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from machine_code import CASES
from msgspec import structs
from record import options, write
from steps import compiled

from megakernel import machine as machines
from megakernel.isa.record import INDEXED, signals, waits, word_counter
from megakernel.machine import ONE_ROW, Machine
from megakernel.machine import Path as CodePath
from megakernel.model import load_config
from megakernel.program import Program
from megakernel.scheduler import Options
from megakernel.scheduler.tune.fastest import predicted_seconds


def cheaper(machine: Machine) -> dict[str, Machine]:
    """Return copies of a machine on which parts of the interpreter's work take no time."""
    paths, pages = machine.paths or {}, ("pass_page", "weight_page", "input_page", "tile_step")
    free_pages, free_hand_off = (
        {prefix + name: CodePath(0.0, 0.0) for name in names for prefix in ("", ONE_ROW)}
        for names in (pages, ["hand_off"])
    )
    costs = structs.replace(machine.costs, dispatch_s=0.0)
    return {
        "controller": replace(machine, costs=costs),
        "pages": replace(machine, paths=paths | free_pages),
        "hand-offs": replace(machine, paths=paths | free_hand_off),
        "all": replace(machine, costs=costs, paths=paths | free_pages | free_hand_off),
    }


def local_waits(program: Program) -> tuple[int, int]:
    """Return how many waits of a layer are only for instructions of the same stream (worker), and how many waits a
    layer has. If the step's inputs select the counter of a wait, the wait counts as one for other streams."""
    stream = np.repeat(np.arange(program.ranks * program.workers), np.diff(program.body.offsets))
    records = program.body.records
    who, many = np.full(program.counters, -1), np.zeros(program.counters, bool)
    for words in signals(records).T:
        used = words != 0
        counter = word_counter(words[used])
        np.maximum.at(who, counter, stream[used])
        many[counter[(words[used] & INDEXED) != 0]] = True
    for words in signals(records).T:
        used = words != 0
        counter = word_counter(words[used])
        many[counter[who[counter] != stream[used]]] = True
    for words in signals(program.queues.records).T:
        many[word_counter(words[words != 0])] = True
    local = total = 0
    for words in waits(records).T:
        used = words != 0
        counter = word_counter(words[used])
        alone = ~many[counter] & (who[counter] == stream[used]) & ((words[used] & INDEXED) == 0)
        local, total = local + int(alone.sum()), total + int(used.sum())
    return local, total


def measure(model: str, name: str, tokens: int, tp: int) -> dict[str, Any]:
    machine = machines.load(name)
    chosen = Options(o="replicated", queue="body") if tp > 1 else Options()
    program = compiled(load_config(model), machine, tokens, context=128, seqs=tokens, tp=tp, options=chosen)
    step = predicted_seconds(program, machine)
    saved = {what: step - predicted_seconds(program, other) for what, other in cheaper(machine).items()}
    each = program.instructions / program.ranks / program.workers
    local, total = local_waits(program)
    return {
        "model": model,
        "machine": name,
        "tokens": tokens,
        "tp": tp,
        "step_s": step,
        "instructions_per_sm": each,
        "saved_s": saved,
        "share": {what: seconds / step for what, seconds in saved.items()},
        "local_waits": local,
        "waits": total,
    }


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = []
    for case in CASES:
        for machine in ("h100", "h200") if case.tp == 1 else (case.machine,):
            rows.append(row := measure(case.model, machine, case.tokens, case.tp))
            shares = ", ".join(f"{what} {share:.1%}" for what, share in row["share"].items())
            print(
                f"{case.name}, {case.tokens} rows, {machine}: {row['step_s'] * 1e6:,.0f} us,"
                f" {row['instructions_per_sm']:,.0f} instructions per SM; without cost: {shares}; streams"
                f" have {row['waits']} waits in a layer, of which {row['local_waits']} stay on their SM",
                flush=True,
            )
    write(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
