"""Simulates the steps that how_it_works.py draws."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from numpy.typing import NDArray
from steps import compiled

from megakernel import machine as machines
from megakernel.isa.record import phase_number
from megakernel.model import load_config
from megakernel.program import SEGMENTS, Program
from megakernel.runtime import even_step
from megakernel.scheduler import Options
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import costs_of
from megakernel.timeline.resolve import resolve
from megakernel.trace import PROLOGUE, IntervalKind, Intervals

MACHINE = machines.load("h100")


@cache
def decode(layers: int) -> Program:
    """Compile a decode step of one sequence for Llama-3.2-1B, with only `layers` layers, on one H100."""
    config = replace(load_config("random:llama-3.2-1b"), layers=layers)
    return compiled(config, MACHINE, 1, context=256)


def batch(model: str, tp: int, tokens: int, options: Options) -> Program:
    """Compile a decode step of `tokens` sequences for three layers of a model on `tp` H100s."""
    config = replace(load_config(f"random:{model}"), layers=3)
    return compiled(config, MACHINE, tokens, context=256, logit_rows=1, seqs=tokens, tp=tp, options=options)


@dataclass(frozen=True)
class Interval:
    """An interval of a trace that belongs to one of the model's layers. Times are in microseconds."""

    number: int  # index of the interval in the trace
    phase: str
    instruction: tuple[int, int]  # layer, record
    kind: IntervalKind
    begin: float
    end: float


class Run:
    """A simulated step."""

    def __init__(self, program: Program, *, pipelined: bool = True) -> None:
        costs = costs_of(MACHINE) if pipelined else costs_of(MACHINE).unpipelined()
        table = even_step(program.dims, program.dims.bucket.tokens, 128)
        trace = simulate(program, MACHINE, table, costs=costs, trace=True).trace
        assert trace is not None
        self.rows: Intervals = trace.intervals
        self.releasers: NDArray[np.int64] = resolve(program, trace).releaser
        numbers = phase_number(program.numbered(SEGMENTS.index("body"))[0]).tolist()
        self.names = np.array([program.forward.by_number[n].name for n in numbers])

    def of(self, rank: int, worker: int) -> list[Interval]:
        """Return the intervals of one worker (SM) in all layers, ordered by their beginnings."""
        rows = self.rows
        here = (rows["rank"] == rank) & (rows["worker"] == worker) & (rows["layer"] < PROLOGUE)
        return sorted((self.at(i) for i in np.flatnonzero(here).tolist()), key=lambda one: one.begin)

    def at(self, number: int) -> Interval:
        row = self.rows[number]
        layer, record, kind = int(row["layer"]), int(row["instruction"]), IntervalKind(int(row["kind"]))
        begin, end = int(row["begin"]) / 1e3, int(row["end"]) / 1e3
        return Interval(number, str(self.names[record]), (layer, record), kind, begin, end)

    def share(self, edges: NDArray[np.float64], kind: IntervalKind, phases: Sequence[str]) -> NDArray[np.float64]:
        """Return the fraction of rank 0's workers (SMs) that are in an interval of this kind and of one of these
        phases.

        `edges` are times in nanoseconds. The result has the mean fraction between each pair of successive edges.
        """
        rows = self.rows
        mine = (rows["rank"] == 0) & (rows["kind"] == kind) & (rows["layer"] < PROLOGUE)
        mine[mine] = np.isin(self.names[rows["instruction"][mine]], phases)
        begin, end = (rows[name][mine].astype(np.float64) for name in ("begin", "end"))
        before_edge = np.array([np.clip(edge - begin, 0, end - begin).sum() for edge in edges])
        return np.diff(before_edge) / np.diff(edges) / MACHINE.workers
