"""Decodes a program's instructions, and finds the data that they access and the counters that they signal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, Access, Buffer, Dims, Phase, accesses
from ..isa import record as bits
from ..isa.ragged import ragged
from ..isa.record import Records
from .phases import Ints, phases_of
from .program import SEGMENTS, Program, Segment

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Word:
    """All waits, or all signals, of some instruction records. Each array has one entry per wait or signal: the index
    `row` of its record, its index `slot` in the record, and the bit fields of its word."""

    row: Ints
    slot: Ints
    raw: NDArray[np.int32]
    counter: Ints
    rank: Ints
    next: Mask
    indexed: Mask


def _words(words: NDArray[np.int32]) -> Word:
    row, slot = np.nonzero(words)
    word = words[row, slot]
    return Word(
        row,
        slot,
        word,
        bits.word_counter(word).astype(np.int64),
        bits.word_rank(word).astype(np.int64),
        word & bits.NEXT != 0,
        word & bits.INDEXED != 0,
    )


@dataclass(frozen=True)
class Signals:
    """All signals that records (instructions) may send, sorted by record: the counter, and the rank it is on. For some
    signals, the step table decides at run time, so there is an entry for each possibility. An INDEXED signal may go to
    the counter of any row block (group of token rows). An OWNER signal goes to the rank that owns the row block."""

    record: Ints
    rank: Ints
    counter: Ints
    ahead: Ints  # 1 if the counter is in the next layer's block, else 0
    maybe: Mask  # whether the step table selects the counter among several

    @staticmethod
    def of(program: Program, records: Records) -> Signals:
        words = _words(bits.signals(records))
        copies = np.where(words.indexed, program.dims.bucket.row_blocks, 1)
        everyone = words.rank == bits.ALL_RANKS
        at, nth = ragged(copies * np.where(everyone, program.ranks, 1))
        rank = np.where(everyone[at], nth // copies[at], words.rank[at])
        return Signals(
            record=words.row[at],
            rank=np.where(rank == bits.OWNER, nth % program.ranks, rank),
            counter=words.counter[at] + nth % copies[at],
            ahead=words.next[at].astype(np.int64),
            maybe=copies[at] > 1,
        )


class Part:
    """A decoded segment (prologue, body or epilogue): its instruction records, where each record is in the streams, and
    all waits and signals.

    The body also has the records of queues (lists of instructions that any worker may take), after those of streams.
    For these, `queue` is the queue's number, counted over all ranks, and `position` the index in the queue. For all
    other records, `queue` is -1.
    """

    def __init__(self, program: Program, name: str) -> None:
        segment: Segment = getattr(program, name)
        self.name, self.program, self.phases = name, program, phases_of(program.forward)
        self.static = len(segment.records)
        offsets = segment.offsets.astype(np.int64)
        self.stream = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        self.position = np.arange(self.static) - offsets[self.stream]
        self.records, self.rank = program.numbered(SEGMENTS.index(name))
        self.queue: Ints = np.full(self.static, -1)
        if name == "body" and len(program.queues.records):
            begin = program.queues.offsets.astype(np.int64)
            queue = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
            self.position = np.concatenate([self.position, np.arange(len(queue)) - begin[queue]])
            self.queue = np.concatenate([self.queue, queue])
        self.number = bits.phase_number(self.records)
        self.waits = _words(bits.waits(self.records))
        self.signals = _words(bits.signals(self.records))

    def rows(self, phase: Phase | None) -> Ints:
        return np.nonzero(self.number == (phase.number if phase else -1))[0]

    def label(self, row: int) -> str:
        """Describe an instruction in the text of a violation: its phase, its operands, and where it is."""
        phase = self.phases.by_number.get(int(self.number[row]))
        name, operands = f"phase {self.number[row]}", ""
        if phase:
            name = phase.name
            columns = phase.columns(self.records[row : row + 1])
            operands = "(" + ", ".join(f"{k}={v[0]}" for k, v in columns.items()) + ")"
        if row < self.static:
            where = f"worker {self.stream[row] % self.program.workers}"
        else:
            where = f"queue {self.queue[row] % self.program.rank_queues}"
        return f"{name}{operands} [{self.name}, rank {self.rank[row]}, {where}, position {self.position[row]}]"


def each(part: Part, rows: Iterable[np.intp] | Ints, what: str) -> Iterator[str]:
    """Yield a violation for each instruction of a segment that `rows` lists. `what` describes the violation."""
    for row in rows:
        yield f"{part.label(int(row))}: {what}"


def extent(buffer: Buffer, dims: Dims) -> tuple[int, int]:
    """Return the number of rows and columns in one rank's copy of a buffer, counted as `Access` counts them."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return dims.bucket.tokens, dims.split.kv_cols
    rows, *cols = BUFFERS[buffer].shape(dims, 0)
    if dims.model.experts and buffer in (Buffer.ACT, Buffer.EXPERTS_OUT):
        return dims.bucket.tokens, dims.places * cols[0]
    return rows, cols[0] if cols else 1


@dataclass(frozen=True)
class Use:
    """The instructions (`rows`) of one phase on one rank, with all buffer regions that they read or write."""

    part: Part
    phase: Phase
    dims: Dims
    rows: Ints
    accesses: list[Access]


def uses(parts: list[Part]) -> list[Use]:
    """Group the instructions of all segments by phase and rank. Control instructions are left out."""
    return [
        Use(part, phase, dims, rows, accesses(phase, columns, dims))
        for segment, part in enumerate(parts)
        for phase, dims, rows, columns in part.program.by_phase(segment)
        if not phase.control
    ]
