"""A program's records as the checks and the verifier read them: decoded, with the regions that they access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, Access, Buffer, Dims, Phase, accesses
from ..isa import record as bits
from .phases import Ints, all_dims, phases_of
from .program import Program, Segment

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Word:
    """The wait words, or the signal words, of some records, as arrays with one entry for each word that is not empty:
    the `row` of the record, the `slot` of the word in the record, and the fields of the word.
    """

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


class Part:
    """A segment's records, with each record's stream and its position in this stream, and the
    decoded wait and signal words.

    In the body (the segment that every layer runs), the queues' records follow those of the streams, as in a trace. For
    a queue's record, `queue` is the number of the queue, counted over all ranks, and `position` the position in it. For
    other records, `queue` is -1.
    """

    def __init__(self, program: Program, name: str) -> None:
        segment: Segment = getattr(program, name)
        self.name, self.program, self.phases = name, program, phases_of(program.forward)
        self.static = len(segment.records)
        offsets = segment.offsets.astype(np.int64)
        self.stream = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        self.position = np.arange(self.static) - offsets[self.stream]
        self.rank = self.stream // program.workers
        self.records = segment.records
        self.queue: Ints = np.full(self.static, -1)
        if name == "body" and len(program.queues.records):
            begin = program.queues.offsets.astype(np.int64)
            queue = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
            self.records = np.concatenate([self.records, program.queues.records])
            self.position = np.concatenate([self.position, np.arange(len(queue)) - begin[queue]])
            self.rank = np.concatenate([self.rank, queue // program.rank_queues])
            self.queue = np.concatenate([self.queue, queue])
        self.number = bits.phase_number(self.records)
        self.waits = _words(bits.waits(self.records))
        self.signals = _words(bits.signals(self.records))

    def rows(self, phase: Phase | None) -> Ints:
        return np.nonzero(self.number == (phase.number if phase else -1))[0]

    def label(self, row: int) -> str:
        """The text that names an instruction in the description of a violation."""
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
    """Yield a violation, described by `what`, for each of some rows of a part."""
    for row in rows:
        yield f"{part.label(int(row))}: {what}"


def extent(buffer: Buffer, dims: Dims) -> tuple[int, int]:
    """The number of rows and of columns in a rank's copy of a buffer, as `Access` counts them."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return dims.bucket.tokens, dims.split.kv_cols
    rows, *cols = BUFFERS[buffer].shape(dims, 0)
    if dims.model.experts and buffer in (Buffer.ACT, Buffer.EXPERTS_OUT):
        return dims.bucket.tokens, dims.places * cols[0]
    return rows, cols[0] if cols else 1


@dataclass(frozen=True)
class Use:
    """The instructions of one phase on one rank, with all regions of buffers that they read or write."""

    part: Part
    phase: Phase
    dims: Dims
    rows: Ints
    accesses: list[Access]


def uses(parts: list[Part]) -> list[Use]:
    """Group the instructions of each part (a decoded segment) by phase and rank. Joins and drains are left out."""
    out = []
    program = parts[0].program
    dims = all_dims(program.dims)
    for part in parts:
        key = part.number.astype(np.int64) * program.ranks + part.rank
        order = np.argsort(key, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            if not len(rows):
                continue
            phase, d = part.phases.by_number[int(part.number[rows[0]])], dims[part.rank[rows[0]]]
            if not phase.control:
                out.append(Use(part, phase, d, rows, accesses(phase, phase.columns(part.records[rows]), d)))
    return out
