"""Joins a trace's intervals with the instructions of the program: what each interval executed or waited for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .. import machine as machines
from ..errors import MegakernelError
from ..isa import CONTROL, Operation, Phase
from ..isa import record as rec
from ..isa.ragged import ragged
from ..isa.record import Records
from ..machine import MACHINES, Machine
from ..program import Program
from ..program.part import Signals
from ..trace import EPILOGUE, PROLOGUE, IntervalKind, Intervals, Trace
from .spans import Floats, Ints, Mask
from .waits import Causes, Waits, causes

_SLOT = rec.OPERAND_WORD + Operation.ATTENTION.layout.operands.index("slot")
WORK = (IntervalKind.COMPUTE, IntervalKind.STORE)
MOST_TICKS = 1 << 48  # three days in nanoseconds; multiplied by the number of workers, it fits int64
WAIT = (IntervalKind.COUNTER_WAIT, IntervalKind.PAGE_WAIT)


@dataclass(frozen=True, eq=False)
class Resolved:
    """The intervals of a trace, joined with their program. Each array has one entry per interval. Properties are
    computed at their first use and kept.

    `begin` and `end` are ticks since the first interval. `lane` is the worker's number, counted over all ranks.
    `segment` is an index into SEGMENTS (prologue, body, epilogue). `block` is the block of counters that the
    instruction uses: the number of the layer, 0 in the prologue, and the number of layers in the epilogue. `instance`
    numbers the executed instructions: launch x program.instructions + position in the program with its layers unrolled.
    """

    program: Program
    trace: Trace
    machine: Machine
    rows: Intervals
    begin: Ints
    end: Ints
    launch: Ints
    lane: Ints
    segment: Ints
    block: Ints
    instance: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tick_s(self) -> float:
        return self.trace.header.tick_s

    @property
    def lanes(self) -> int:
        return self.program.ranks * self.program.workers

    @property
    def launches(self) -> int:
        return len(self.launch_spans[0])

    @cached_property
    def launch_spans(self) -> tuple[Ints, Ints]:
        """For each launch, the begin of its first interval and the end of its last one, in ticks."""
        launches = int(self.launch.max()) + 1
        first = np.full(launches, np.iinfo(np.int64).max)
        last = np.zeros(launches, dtype=np.int64)
        np.minimum.at(first, self.launch, self.begin)
        np.maximum.at(last, self.launch, self.end)
        return first, last

    @property
    def steps(self) -> int:
        """The time of all launches together, in ticks."""
        first, last = self.launch_spans
        return int((last - first).sum())

    @property
    def step_s(self) -> float:
        """The mean time of a launch in seconds."""
        return self.steps / self.launches * self.tick_s

    @cached_property
    def period(self) -> int:
        """A number of ticks above every time in the trace. In a line of all lanes, lane n begins at n x period."""
        return int(self.end.max()) + 1

    @cached_property
    def executions(self) -> int:
        """How many instructions all launches execute together. `instance` numbers these executions."""
        return self.launches * self.program.instructions

    @cached_property
    def length(self) -> Ints:
        return self.end - self.begin

    @cached_property
    def records(self) -> Records:
        """The records of all three segments, one segment after another, in the order in which a trace numbers them."""
        return self.program.every[0]

    @cached_property
    def record(self) -> Ints:
        """For each interval, the index of its instruction in `records`."""
        index: Ints = np.searchsorted(self.program.every[1], self.segment) + self.rows["instruction"]
        return index

    @cached_property
    def number(self) -> NDArray[np.int32]:
        """For each interval, the number of its instruction's phase."""
        return rec.phase_number(self.records)[self.record]

    @cached_property
    def of_attention(self) -> Ints:
        return np.flatnonzero(np.isin(self.number, self.program.forward.numbers(Operation.ATTENTION)))

    @property
    def control(self) -> Mask:
        """A mask of the intervals that belong to joins and drains, which compute nothing themselves."""
        return np.isin(self.number, [phase.number for phase in CONTROL])

    @property
    def attention(self) -> tuple[Ints, Floats] | None:
        """The indices of attention's intervals, and an array [n, 2] with the FLOPs and the K and V bytes of each. None
        if these were not recorded."""
        if self.trace.attention is None:
            return None
        i = self.of_attention
        slot = self.records[self.record[i], _SLOT]
        return i, self.trace.attention[self.launch[i], self.rows["rank"][i], slot]

    @cached_property
    def causes(self) -> Causes:
        return causes(self.program)

    @cached_property
    def cause(self) -> Ints:
        """For each wait for counters, the phases that can end it: an index into `causes.names`. Otherwise -1."""
        word = self.record, self.rows["slot"] % rec.WAITS
        found = np.where((self.segment == 1) & (self.block > 0), self.causes.later[word], self.causes.first[word])
        return np.where(self.kind(IntervalKind.COUNTER_WAIT), found, -1)

    @cached_property
    def finish(self) -> Ints:
        """For each execution of an instruction, its interval that ends last; -1 if the trace has none."""
        order = np.lexsort((self.rows["kind"], self.end))
        last = np.full(self.executions, -1, dtype=np.int64)
        last[self.instance[order]] = order
        return last

    @cached_property
    def releaser(self) -> Ints:
        """For each wait for counters, the interval of the instruction that ended the wait, so that a viewer can show
        why a worker waited. If an instruction waits for several counters, this is the instruction whose signal came
        last. The value is -1 for all other intervals, and if the trace lacks the instruction.

        If an INDEXED wait may be for one of several counters, the step table selects the counter, but a trace has no
        step table. Then the value is the last instruction that may have signalled before the wait ended.
        """
        key, interval, maybe = self._arrivals()
        end = self.end[interval]
        doubts = np.concatenate([[0], np.cumsum(maybe)])
        header = self.trace.header
        slack = int(np.ceil((header.clock_error_s + 2 * header.read_s) / header.tick_s))
        waits = Waits.of(self.program, self.records)
        word = self.record, self.rows["slot"] % rec.WAITS
        wait = np.flatnonzero(self.kind(IntervalKind.COUNTER_WAIT) & (waits.first[word] >= 0))
        word = word[0][wait], word[1][wait]
        size = waits.members[word]
        base = self._counter(wait, self.rows["rank"][wait], 0, waits.first[word])
        low = np.searchsorted(key, base, side="left")
        high = np.searchsorted(key, base + size - 1, side="right")
        certain = (size == 1) & (doubts[high] == doubts[low])
        last = certain & (high > low)
        result = np.full(len(self), -1, dtype=np.int64)
        result[wait[last]] = interval[high[last] - 1]
        for w, a, b in zip(wait[~certain], low[~certain], high[~certain], strict=True):
            before = a + np.flatnonzero(end[a:b] <= self.end[w] + slack)
            if len(before):
                result[w] = interval[before[np.argmax(end[before])]]
        return result

    def _arrivals(self) -> tuple[Ints, Ints, Mask]:
        """Return all signals of the trace as three arrays, sorted by counter and time. The arrays have the counter, the
        interval at whose end the signal was sent, and whether the signal may have gone to another counter."""
        signals = Signals.of(self.program, self.records)
        done = self.finish[self.finish >= 0]
        begin = np.searchsorted(signals.record, self.record[done], side="left")
        which, nth = ragged(np.searchsorted(signals.record, self.record[done], side="right") - begin)
        at, interval = begin[which] + nth, done[which]
        key = self._counter(interval, signals.rank[at], signals.ahead[at], signals.counter[at])
        order = np.lexsort((self.end[interval], key))
        return key[order], interval[order], signals.maybe[at][order]

    def _counter(self, i: Ints, rank: NDArray[np.integer], ahead: Ints | int, counter: Ints) -> Ints:
        """Return the counter that each interval in `i` waits for or signals, numbered over all launches."""
        block = (
            (self.launch[i] * self.program.ranks + rank.astype(np.int64)) * (self.program.dims.model.layers + 1)
            + self.block[i]
            + ahead
        )
        return block * self.program.counters + counter

    def kind(self, *kinds: IntervalKind) -> Mask:
        return np.isin(self.rows["kind"], kinds)

    def phase(self, i: int) -> Phase:
        return self.program.forward.by_number[int(self.number[i])]

    def operands(self, i: int) -> dict[str, int]:
        words = self.records[self.record[i]]
        return {name: int(words[rec.OPERAND_WORD + k]) for k, name in enumerate(self.phase(i).operands)}

    def layer(self, i: int) -> int | None:
        """Return the layer of interval `i`; None in the prologue and the epilogue."""
        return int(self.rows["layer"][i]) if self.segment[i] == 1 else None


def machine_name(program: Program, trace: Trace) -> str:
    """Return the name of a trace's machine. If that machine is unknown, return the name of its program's machine."""
    name = trace.header.machine
    return name if name == machines.HOST or name in MACHINES else program.machine


def resolve(program: Program, trace: Trace, machine: Machine | None = None) -> Resolved:
    """Join a program and its trace. `machine` gives the peak rates; the default is the machine that `machine_name`
    names, or this one.

    Raises MegakernelError if the trace is empty, damaged, or of another program.
    """
    rows = trace.intervals
    if trace.header.program != program.hash:
        raise MegakernelError(f"the trace is of program {trace.header.program}, not of {program.hash}: record it again")
    if not len(rows):
        raise MegakernelError("the trace holds no intervals: launch with tracing on")
    if int(rows["end"].max()) - int(rows["begin"].min()) > MOST_TICKS:
        raise MegakernelError(f"the trace's intervals span more than {MOST_TICKS} clock ticks: record it again")
    layer = rows["layer"].astype(np.int64)
    segment = np.where(layer == PROLOGUE, 0, np.where(layer == EPILOGUE, 2, 1))
    counts = np.bincount(program.every[1], minlength=3)
    index = rows["instruction"].astype(np.int64)
    layers = program.dims.model.layers
    bad = (
        (index >= counts[segment])
        | ((segment == 1) & (layer >= layers))
        | (rows["rank"] >= program.ranks)
        | (rows["worker"] >= program.workers)
        | (rows["end"] < rows["begin"])
    )
    if bad.any():
        raise MegakernelError(f"interval {int(bad.argmax())} of the trace does not fit the program: record it again")
    launch = np.unique(rows["launch"], return_inverse=True)[1].astype(np.int64)
    expected = (int(launch.max()) + 1, program.ranks, program.dims.bucket.attention_slots, 2)
    if trace.attention is not None and trace.attention.shape != expected:
        raise MegakernelError("the recorded attention does not fit the program: record the trace again")
    start = np.array([0, counts[0], counts[0] + layers * counts[1]])
    run = np.where(segment == 1, layer, 0)
    origin = rows["begin"].min()
    return Resolved(
        program=program,
        trace=trace,
        machine=machine or MACHINES.get(machine_name(program, trace)) or machines.host(),
        rows=rows,
        begin=(rows["begin"] - origin).astype(np.int64),
        end=(rows["end"] - origin).astype(np.int64),
        launch=launch,
        lane=rows["rank"].astype(np.int64) * program.workers + rows["worker"],
        segment=segment,
        block=np.array([0, 0, layers])[segment] + run,
        instance=launch * program.instructions + start[segment] + run * counts[1] + index,
    )
