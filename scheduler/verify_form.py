"""First stage of the verifier: is every record one that an interpreter can decode and execute in bounds?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, BY_NAME, BY_OPCODE, INSTRUCTIONS, Buffer, Dims, Family, Instruction, Kind
from ..isa import record as bits
from ..program import SEGMENTS, Program, Segment

Ints = NDArray[np.int64]

_OPS = [i for i in INSTRUCTIONS if i.family is not Family.CONTROL]
_LAYERED = [i.opcode for i in _OPS if i.layered]
_KNOWN_BITS = bits.COUNTER_MASK | bits.RANK_MASK << bits.RANK_SHIFT | bits.NEXT | bits.INDEXED


def home(instruction: Instruction) -> str | None:
    """The segment that an instruction belongs to, from the table's order; None: any."""
    if instruction.family is Family.CONTROL:
        return None
    if instruction.layered:
        return "body"
    return "prologue" if instruction.opcode < min(_LAYERED) else "epilogue"


def extent(buffer: Buffer, dims: Dims) -> tuple[int, int]:
    """Rows and columns of a buffer as `Access` counts them."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return dims.tokens, dims.kv_cols
    rows, *cols = BUFFERS[buffer].shape(dims, 0)
    return rows, cols[0] if cols else 1


@dataclass(frozen=True)
class Word:
    """The wait or signal words in use: `row` and `slot` of the record, and what each word says."""

    row: Ints
    slot: Ints
    counter: Ints
    rank: Ints
    next: NDArray[np.bool_]
    indexed: NDArray[np.bool_]


def _words(records: NDArray[np.int32], first: int, count: int) -> Word:
    block = records[:, first : first + count]
    row, slot = np.nonzero(block)
    word = block[row, slot]
    return Word(
        row,
        slot,
        bits.word_counter(word).astype(np.int64),
        bits.word_rank(word).astype(np.int64),
        word & bits.NEXT != 0,
        word & bits.INDEXED != 0,
    )


class Part:
    """A segment's records with their stream, position in the stream's part of the segment, and decoded words."""

    def __init__(self, program: Program, name: str) -> None:
        segment: Segment = getattr(program, name)
        self.name, self.program = name, program
        self.records = segment.records
        self.offsets = segment.offsets.astype(np.int64)
        self.lengths = np.diff(self.offsets)
        self.stream = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.position = np.arange(len(self.records)) - self.offsets[self.stream]
        self.rank = self.stream // program.workers
        self.opcode = bits.opcode(self.records)
        self.waits = _words(self.records, bits.WAIT_WORD, bits.WAITS)
        self.signals = _words(self.records, bits.SIGNAL_WORD, bits.SIGNALS)

    def rows(self, instruction: Instruction) -> Ints:
        return np.nonzero(self.opcode == instruction.opcode)[0]

    def label(self, row: int) -> str:
        """An instruction as a violation names it."""
        instruction = BY_OPCODE.get(int(self.opcode[row]))
        name, operands = f"opcode {self.opcode[row]}", ""
        if instruction:
            name = instruction.name
            columns = instruction.columns(self.records[row : row + 1])
            operands = "(" + ", ".join(f"{k}={v[0]}" for k, v in columns.items()) + ")"
        stream = int(self.stream[row])
        rank, worker = divmod(stream, self.program.workers)
        return f"{name}{operands} [{self.name}, rank {rank}, worker {worker}, position {self.position[row]}]"


def check_layout(program: Program) -> Iterator[str]:
    """Shapes of the arrays; everything after relies on them."""
    dims, streams = program.dims, program.ranks * program.workers
    if program.ranks < 1 or program.workers < 1 or dims.layers < 1 or program.counters < 1:
        yield "ranks, workers, layers and counters must all be at least 1"
    if program.ranks > bits.ALL_RANKS:
        yield f"{program.ranks} ranks do not fit a signal word"
    for name in SEGMENTS:
        segment: Segment = getattr(program, name)
        shape, offsets = segment.records.shape, segment.offsets
        if len(shape) != 2 or shape[1] != bits.WORDS:
            yield f"{name}: records have shape {shape}, not [n, {bits.WORDS}]"
        elif (
            offsets.shape != (streams + 1,)
            or offsets[0] != 0
            or offsets[-1] != shape[0]
            or (np.diff(offsets) < 0).any()
        ):
            yield f"{name}: worker offsets are not monotone from 0 to {shape[0]} over {streams} streams"
    for name in ("totals_first", "totals_middle", "totals_last"):
        if getattr(program, name).shape != (program.ranks, program.counters):
            yield f"{name}: shape {getattr(program, name).shape}, not ({program.ranks}, {program.counters})"


def check_records(program: Program, parts: list[Part]) -> Iterator[str]:
    """Everything one record can get wrong by itself, and the attention instructions together."""
    for part in parts:
        yield from _headers(part)
        yield from _operands(part, program.dims)
        yield from _counters(part)
    yield from _attention(program, next(p for p in parts if p.name == "body"))


def _each(part: Part, rows: Iterable[np.intp], what: str) -> Iterator[str]:
    for row in rows:
        yield f"{part.label(int(row))}: {what}"


def _headers(part: Part) -> Iterator[str]:
    known = np.isin(part.opcode, list(BY_OPCODE))
    yield from _each(part, np.nonzero(~known)[0], "unknown opcode")
    yield from _each(part, np.nonzero(part.records[:, 0] != part.opcode)[0], "the header's layer and flags must be 0")
    for instruction in INSTRUCTIONS:
        where = home(instruction)
        if where not in (None, part.name):
            yield from _each(part, part.rows(instruction), f"belongs in the {where}")


def _operands(part: Part, dims: Dims) -> Iterator[str]:
    for instruction in INSTRUCTIONS:
        rows = part.rows(instruction)
        columns = instruction.columns(part.records[rows])
        written: Ints = np.zeros(len(rows), dtype=np.int64)
        for access in instruction.accesses(columns, dims) if len(rows) else ():
            height, width = extent(access.buffer, dims)
            bad = (access.row < 0) | (access.row_end <= access.row) | (access.row_end > height)
            bad |= (access.col < 0) | (access.col_end < access.col) | (access.col_end > width)
            what = f"its box lies outside {access.buffer.name} [{height}, {width}]"
            yield from _each(part, rows[bad], what)
            if access.kind is not Kind.READ:
                written += access.col_end - access.col
        if "cols" in columns:
            bad = (columns["cols"] < 1) | (written != columns["cols"])
            yield from _each(part, rows[bad], "its column tile lies outside the output")
        if instruction.name == "qkv_rope":
            bad = (columns["col"] % 2 != 0) | (columns["cols"] % 2 != 0)
            yield from _each(part, rows[bad], "its column tile cuts a RoPE pair")


def grid_size(part: Part, row: int, signal: bool) -> int | None:
    """Members of the grid that word 0 of this record names; None: the instruction has no indexed word there."""
    name, dims = BY_OPCODE[int(part.opcode[row])].name, part.program.dims
    if name == "attention":
        groups = int(BY_NAME["attention"].columns(part.records[row : row + 1])["groups"][0])
        return dims.row_blocks * (1 if signal else groups)
    return dims.row_blocks if name == "final_norm" and not signal else None


def _counters(part: Part) -> Iterator[str]:
    program = part.program
    for words, signal in ((part.waits, False), (part.signals, True)):
        what = "signal" if signal else "wait"
        raw = part.records[words.row, (bits.SIGNAL_WORD if signal else bits.WAIT_WORD) + words.slot]
        bad = (raw & ~np.int32(_KNOWN_BITS) != 0) | (words.counter < 0) | (words.counter >= program.counters)
        yield from _each(part, words.row[bad], f"a {what} names no counter of the block of {program.counters}")
        if signal:
            bad = (words.rank >= program.ranks) & (words.rank != bits.ALL_RANKS)
            yield from _each(part, words.row[bad], "a signal names no rank")
            if part.name != "body":
                yield from _each(part, words.row[words.next], "only the body signals the next block")
        else:
            yield from _each(part, words.row[words.rank != 0], "a wait is always on the own rank")
            yield from _each(part, words.row[words.next], "a run waits on its own block only")
        for i in np.nonzero(words.indexed)[0]:
            row = int(words.row[i])
            size = grid_size(part, row, signal) if int(part.opcode[row]) in BY_OPCODE else None
            if size is None or words.slot[i] != 0:
                yield f"{part.label(row)}: {what} word {words.slot[i]} cannot be indexed"
            elif words.counter[i] + size > program.counters:
                yield f"{part.label(row)}: its {what} grid of {size} runs past the block of {program.counters}"


def _attention(program: Program, body: Part) -> Iterator[str]:
    """Any slot may run any item, so all attention instructions of a rank must name the same grids."""
    dims, instruction = program.dims, BY_NAME["attention"]
    rows = body.rows(instruction)
    columns = instruction.columns(body.records[rows])
    heads, groups, slots = columns["group_heads"], columns["groups"], columns["slot"]
    bad = (heads < 1) | (groups != -(-dims.kv_heads // np.maximum(heads, 1)))
    yield from _each(body, rows[bad], f"its groups do not cover {dims.kv_heads} KV heads")
    for words, what in ((body.waits, "wait"), (body.signals, "signal")):
        indexed = np.unique(words.row[words.indexed & (words.slot == 0)])
        yield from _each(body, np.setdiff1d(rows, indexed), f"its {what} word 0 must name a grid")
    for rank in range(program.ranks):
        mine = body.rank[rows] == rank
        if not np.array_equal(np.sort(slots[mine]), np.arange(dims.attention_slots)):
            found = np.sort(slots[mine]).tolist()
            yield f"attention: rank {rank} has slots {found}, not each of 0..{dims.attention_slots - 1} once"
        words0 = body.records[rows[mine]][:, [bits.WAIT_WORD, bits.SIGNAL_WORD]]
        differ = (words0 != words0[:1]).any(axis=1)
        yield from _each(body, rows[mine][differ], "its grids differ from the first attention instruction's")
    yield from _each(body, rows[heads != heads[:1]], "its groups differ from the first attention instruction's")
