"""Joins a trace's intervals with the program that made them: which instruction, on which lane, when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import CONTROL, Column, Dims, Operation, Phase
from ..isa import record as rec
from ..isa.record import Records
from ..program import Program
from ..trace import EPILOGUE, PROLOGUE, IntervalKind, Intervals, Role, Trace

_SLOT = rec.OPERAND_WORD + Operation.ATTENTION.layout.operands.index("slot")
WORK = (IntervalKind.COMPUTE, IntervalKind.STORE)
MOST_TICKS = 1 << 48  # three days in nanoseconds; the product with the number of lanes fits int64
WAIT = (IntervalKind.COUNTER_WAIT, IntervalKind.PAGE_WAIT)


@dataclass(frozen=True)
class Resolved:
    """The intervals of a trace, joined with their program: columns with one entry per interval of `rows`.

    `begin` and `end` are ticks since the first interval. `lane` is rank x workers + worker. `segment` is an index into
    SEGMENTS. `block` is the block of counters that the instruction uses: the layer number, 0 in the prologue, and the
    number of layers in the epilogue. `instance` numbers the executed instructions: launch x program.instructions +
    position in the unrolled program.
    """

    program: Program
    trace: Trace
    rows: Intervals
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    launch: NDArray[np.int64]
    lane: NDArray[np.int64]
    segment: NDArray[np.int64]
    block: NDArray[np.int64]
    instance: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lanes(self) -> int:
        return self.program.ranks * self.program.workers

    @property
    def launches(self) -> int:
        return int(self.launch.max()) + 1

    @property
    def period(self) -> int:
        """Return a number of ticks that is larger than every time in the trace. Lane n starts at n x period on the time
        line that all lanes share.
        """
        return int(self.end.max()) + 1

    @cached_property
    def records(self) -> Records:
        """Return the instruction records of all segments, one segment after another. Within a segment, they have the
        order in which a trace numbers them.
        """
        return np.concatenate([self.program.numbered(segment)[0] for segment in range(3)])

    @cached_property
    def record(self) -> NDArray[np.int64]:
        """Return, for each interval, the index of its instruction in `records`."""
        starts = np.cumsum([0, *(len(self.program.numbered(s)[0]) for s in range(2))])
        index: NDArray[np.int64] = starts[self.segment] + self.rows["instruction"]
        return index

    @cached_property
    def number(self) -> NDArray[np.int32]:
        """Return, for each interval, the phase number of its instruction."""
        return rec.phase_number(self.records)[self.record]

    @cached_property
    def control(self) -> NDArray[np.bool_]:
        """Return a mask of the intervals that belong to control instructions, which compute nothing."""
        return np.isin(self.number, [phase.number for phase in CONTROL])

    @cached_property
    def stored(self) -> NDArray[np.bool_]:
        """Return a mask of the STORE intervals of storers. Such a store delays no other role of its worker."""
        chosen: NDArray[np.bool_] = self.kind(IntervalKind.STORE) & (self.rows["role"] == Role.STORER)
        return chosen

    @cached_property
    def of_attention(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.isin(self.number, self.program.forward.numbers(Operation.ATTENTION)))

    @cached_property
    def attention(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Return the indices of the n intervals of attention instructions, and an array [n, 2]. For each of these
        intervals, the array has two figures of the executed instruction: the FLOPs, and the bytes of K and V. The
        result is None if the trace lacks these figures.
        """
        if self.trace.attention is None:
            return None
        i = self.of_attention
        slot = self.records[self.record[i], _SLOT]
        return i, self.trace.attention[self.launch[i], self.rows["rank"][i], slot]

    def kind(self, *kinds: IntervalKind) -> NDArray[np.bool_]:
        return np.isin(self.rows["kind"], kinds)

    def launch_spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the begin of the first interval and the end of the last interval of each launch, in ticks."""
        first = np.full(self.launches, np.iinfo(np.int64).max)
        last = np.zeros(self.launches, dtype=np.int64)
        np.minimum.at(first, self.launch, self.begin)
        np.maximum.at(last, self.launch, self.end)
        return first, last

    def phase(self, i: int) -> Phase:
        return self.program.forward.by_number[int(self.number[i])]

    def operands(self, i: int) -> dict[str, int]:
        words = self.records[self.record[i]]
        return {name: int(words[rec.OPERAND_WORD + k]) for k, name in enumerate(self.phase(i).operands)}

    def layer(self, i: int) -> int | None:
        """Return the layer of interval i, or None in the prologue and the epilogue."""
        return int(self.rows["layer"][i]) if self.segment[i] == 1 else None


def by_phase(program: Program) -> Iterator[tuple[Phase, Dims, NDArray[np.int64], dict[str, Column]]]:
    """Yield what `Program.by_phase` yields for each of the three segments. Row numbers refer to `Resolved.records`."""
    start = 0
    for segment in range(3):
        for phase, dims, rows, columns in program.by_phase(segment):
            yield phase, dims, start + rows, columns
        start += len(program.numbered(segment)[0])


def resolve(program: Program, trace: Trace) -> Resolved:
    """Join a program and its trace. Raises MegakernelError if the trace is empty or damaged, or
    belongs to another program.
    """
    rows = trace.intervals
    if trace.header.program != program.hash:
        raise MegakernelError(f"the trace is of program {trace.header.program}, not of {program.hash}: record it again")
    if not len(rows):
        raise MegakernelError("the trace holds no intervals: launch with tracing on")
    if int(rows["end"].max()) - int(rows["begin"].min()) > MOST_TICKS:
        raise MegakernelError(f"the trace's intervals span more than {MOST_TICKS} ticks: the trace is damaged")
    layer = rows["layer"].astype(np.int64)
    segment = np.where(layer == PROLOGUE, 0, np.where(layer == EPILOGUE, 2, 1))
    counts = np.array([len(program.numbered(s)[0]) for s in range(3)])
    index = rows["instruction"].astype(np.int64)
    layers = program.dims.layers
    bad = (
        (index >= counts[segment])
        | ((segment == 1) & (layer >= layers))
        | (rows["rank"] >= program.ranks)
        | (rows["worker"] >= program.workers)
        | (rows["end"] < rows["begin"])
    )
    if bad.any():
        raise MegakernelError(f"trace interval {int(bad.argmax())} does not fit its program: the trace is damaged")
    launch = np.unique(rows["launch"], return_inverse=True)[1].astype(np.int64)
    expected = (int(launch.max()) + 1, program.ranks, program.dims.attention_slots, 2)
    if trace.attention is not None and trace.attention.shape != expected:
        raise MegakernelError("the recorded attention does not fit its program: the trace is damaged")
    start = np.array([0, counts[0], counts[0] + layers * counts[1]])
    run = np.where(segment == 1, layer, 0)
    origin = rows["begin"].min()
    return Resolved(
        program=program,
        trace=trace,
        rows=rows,
        begin=(rows["begin"] - origin).astype(np.int64),
        end=(rows["end"] - origin).astype(np.int64),
        launch=launch,
        lane=rows["rank"].astype(np.int64) * program.workers + rows["worker"],
        segment=segment,
        block=np.array([0, 0, layers])[segment] + run,
        instance=launch * program.instructions + start[segment] + run * counts[1] + index,
    )
