"""A compiled program, in the form in which it is stored and executed.

Each worker (SM or CPU core) of each rank has a stream, a list of instruction records that it executes in order.
Instructions of different streams are ordered by counters. An instruction that has stored its results adds to a counter;
this is called a signal. An instruction that needs these results waits until the counter has reached its total, which is
the sum of all additions in a launch.

A program has three segments: prologue, body and epilogue. The body is stored once and runs once per layer, each time
with this layer's weights, KV cache and block of counters. Each rank has its own copy of all counters: one block per
layer, and one more. Layer l signals in block l or, if the signal has the NEXT bit, in block l + 1, for which the next
layer waits. So the prologue signals to layer 0 in block 0, and the last layer signals to the epilogue in the last
block.

Three sets of totals are stored: for the first block, for the last block, and one for all blocks between. The first set
differs because the prologue, not an earlier layer, adds to the first block. The last set differs because no layer uses
the last block as its own.

A rank may also have queues. A queue is a list of body instructions that are not assigned to a worker. In each layer,
workers take these instructions from the queue in order, by `drain` instructions in their streams. In traces and
messages, the instructions of queues are numbered after those of streams.

With more than one rank, a program ends in a barrier: the last instruction of every stream waits until all other work of
every rank is done. This separates launches, and scheduler/verify/proof.py relies on it. Otherwise, the next launch
could overwrite data that a slower rank still needs, or add to a counter for which this rank still waits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import whole_file
from ..isa import Column, Dims, Forward, Phase
from ..isa.record import WORDS, Records, phase_number

# The format of a program file, with lengths in bytes:
#   7   MAGIC
#   1   VERSION
#   32  SHA-256 of everything that follows
#   8   length of the header
#   ..  the header: JSON, and spaces up to a multiple of ALIGNMENT
#   ..  the arrays, int32, in the order in which the header lists their names and lengths
MAGIC = b"MKPROG\0"
VERSION = 8
HASHED = 40  # the SHA-256 covers all bytes of the file from this offset on
START = 48  # offset of the header in the file
ALIGNMENT = 64  # in the file, arrays begin at multiples of this number of bytes

SEGMENTS = ("prologue", "body", "epilogue")
TOTALS = ("totals_first", "totals_middle", "totals_last")


@dataclass(frozen=True)
class Segment:
    """The streams of all ranks. Worker w of rank r has stream s = r * (workers per rank) + w, which is
    records[offsets[s]:offsets[s+1]]."""

    records: Records
    offsets: NDArray[np.int32]

    def stream(self, index: int) -> Records:
        return self.records[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, eq=False)
class Program:
    """An immutable program. Instructions name the phases in `forward` by number. `machine` is the name of the machine
    for which it was compiled. `counters` is the number of counters in the block of a layer."""

    dims: Dims
    forward: Forward
    machine: str
    ranks: int
    workers: int
    counters: int
    prologue: Segment
    body: Segment
    epilogue: Segment
    totals_first: NDArray[np.int32]  # [ranks, counters], as are the next two arrays
    totals_middle: NDArray[np.int32]
    totals_last: NDArray[np.int32]
    queues: Segment = field(default_factory=lambda: Segment(np.zeros((0, WORDS), np.int32), np.zeros(1, np.int32)))

    @property
    def instructions(self) -> int:
        """The number of instructions that all ranks execute per launch. Those of the body count once per layer."""
        body = len(self.body.records) + len(self.queues.records)
        return len(self.prologue.records) + self.dims.model.layers * body + len(self.epilogue.records)

    @property
    def rank_queues(self) -> int:
        """The number of queues per rank. Queue q of rank r has the index r * rank_queues + q in `queues`."""
        return (len(self.queues.offsets) - 1) // self.ranks

    def numbered(self, index: int) -> tuple[Records, NDArray[np.int64]]:
        """Return a segment's records and the rank of each record. Their order is that in which traces number
        instructions: first those of streams, then those of queues. `index` is the segment's index in SEGMENTS."""
        segment: Segment = getattr(self, SEGMENTS[index])
        ranks = np.repeat(np.arange(self.ranks * self.workers) // self.workers, np.diff(segment.offsets))
        if SEGMENTS[index] != "body":
            return segment.records, ranks
        queues = np.arange(len(self.queues.offsets) - 1) // max(self.rank_queues, 1)
        ranks = np.concatenate([ranks, np.repeat(queues, np.diff(self.queues.offsets))])
        return np.concatenate([segment.records, self.queues.records]), ranks

    @property
    def every(self) -> tuple[Records, NDArray[np.int64], NDArray[np.int64]]:
        """The records of all segments, one segment after another in the order of `numbered`, and for each record the
        index of its segment and its rank."""
        parts = [self.numbered(index) for index in range(len(SEGMENTS))]
        records, ranks = (np.concatenate(column) for column in zip(*parts, strict=True))
        return records, np.repeat(np.arange(len(parts)), [len(own) for own, _ in parts]), ranks

    def by_phase(self, index: int | None = None) -> Iterator[tuple[Phase, Dims, NDArray[np.int64], dict[str, Column]]]:
        """For each phase with records in a segment and each rank, yield the phase, the rank's sizes, the indices of the
        records in `numbered(index)`, and their operands. Phases come in the order of their numbers. Without `index`,
        the records are those of all segments, with their indices in `every`."""
        records, ranks = self.every[::2] if index is None else self.numbered(index)
        key = phase_number(records) * np.int64(self.ranks) + ranks
        order = np.argsort(key, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            if len(rows):
                number, rank = divmod(int(key[rows[0]]), self.ranks)
                phase = self.forward.by_number[number]
                yield phase, self.dims.ranks[rank], rows, phase.columns(records[rows])

    def phases(self, index: int) -> list[Segment]:
        """Divide a segment into phases. Each phase becomes a Segment with all its instructions, in the streams of all
        ranks.

        Such Segments are the reference for the program's results. They need no counters, because they run one after
        another, with a barrier over all ranks in between; those of the body run once per layer. Control instructions
        are left out, and the instructions of a queue are divided among the workers of its rank.
        """
        records, ranks = self.numbered(index)
        segment: Segment = getattr(self, SEGMENTS[index])
        streams = np.repeat(np.arange(self.ranks * self.workers), np.diff(segment.offsets))
        if len(streams) < len(records):
            claimed = ranks[len(streams) :]
            first = np.searchsorted(claimed, claimed)
            dealt = claimed * self.workers + (np.arange(len(claimed)) - first) % self.workers
            streams = np.concatenate([streams, dealt])
        out = []
        for phase in self.forward.segments[index]:
            rows = np.flatnonzero(phase_number(records) == phase.number)
            rows = rows[np.argsort(streams[rows], kind="stable")]
            lengths = np.bincount(streams[rows], minlength=self.ranks * self.workers)
            if len(rows):
                out.append(Segment(records[rows], np.cumsum([0, *lengths]).astype(np.int32)))
        return out

    @property
    def total_counters(self) -> int:
        return (self.dims.model.layers + 1) * self.counters

    def totals(self) -> NDArray[np.int32]:
        """Return what is added to each counter per launch, as an array [layers + 1, ranks, counters]."""
        middle = np.broadcast_to(self.totals_middle, (self.dims.model.layers - 1, self.ranks, self.counters))
        return np.concatenate([self.totals_first[None], middle, self.totals_last[None]])

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """Return the arrays of the program's file by name, in order."""
        out: dict[str, NDArray[np.int32]] = {}
        for name in (*SEGMENTS, "queues"):
            segment: Segment = getattr(self, name)
            out |= {f"{name}.records": segment.records, f"{name}.offsets": segment.offsets}
        return out | {name: getattr(self, name).reshape(-1) for name in TOTALS}

    def native_arrays(self) -> dict[str, list[NDArray[np.int32]]]:
        """Return the arrays for native code: the records and offsets of each segment and the queues, and the totals."""
        arrays, lists = [np.ascontiguousarray(a, np.int32) for a in self.arrays().values()], 2 * (len(SEGMENTS) + 1)
        return {"records": arrays[:lists:2], "offsets": arrays[1:lists:2], "totals": arrays[lists:]}

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the program's content."""
        return hashlib.sha256(self._content()).digest()

    def to_bytes(self) -> bytes:
        content = self._content()
        return b"".join([MAGIC, bytes([VERSION]), hashlib.sha256(content).digest(), content])

    def _content(self) -> bytes:
        arrays = self.arrays()
        fields = {
            "dims": self.dims.flat,
            "forward": self.forward.to_json(),
            "machine": self.machine,
            "ranks": self.ranks,
            "workers": self.workers,
            "counters": self.counters,
            "arrays": [[name, len(array)] for name, array in arrays.items()],
        }
        text = json.dumps(fields, sort_keys=True).encode()
        text += b" " * (-(START + len(text)) % ALIGNMENT)
        length = len(text).to_bytes(START - HASHED, "little")
        return b"".join([length, text, *(np.ascontiguousarray(a, dtype="<i4").data for a in arrays.values())])

    def save(self, path: Path) -> None:
        """Write the file atomically, so that no process ever reads an incomplete file."""
        with whole_file(path, f"program {path}") as part:
            part.write_bytes(self.to_bytes())
