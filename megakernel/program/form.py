"""Checks that interpreters can decode every record, with operands and counters in range."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..isa import DRAIN, OPERATIONS, Dims, Dtype, Operation, Phase, Result, Units
from ..isa import record as bits
from ..isa.step import step_words
from .limits import MOST, MOST_COUNTERS, MOST_STEP_WORDS, MOST_WORKERS
from .phases import Ints, all_dims, phases_of
from .segments import SEGMENTS, Segment

if TYPE_CHECKING:
    from .program import Program

Mask = NDArray[np.bool_]

_KNOWN_BITS = bits.COUNTER_MASK | bits.RANK_MASK << bits.RANK_SHIFT | bits.NEXT | bits.INDEXED
_GROUPS = bits.OPERAND_WORD + OPERATIONS[Operation.ATTENTION].operands.index("groups")


@dataclass(frozen=True)
class Word:
    """The wait words, or the signal words, of some records, as arrays with one entry for each word
    that is not empty: the `row` of the record, the `slot` of the word in the record, and the fields
    of the word.
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


def check_arrays(program: Program) -> Iterator[str]:
    """Check the arrays' shapes, and the offsets of the streams in them. All indexing relies on
    these.
    """
    if program.ranks < 1 or program.workers < 1 or program.dims.layers < 1 or program.counters < 1:
        yield "ranks, workers, layers and counters must all be at least 1"
        return
    for name in SEGMENTS:
        yield from _segment(name, getattr(program, name), program.ranks * program.workers)
    if not len(program.queues.offsets) or (len(program.queues.offsets) - 1) % program.ranks:
        yield f"{len(program.queues.offsets) - 1} queues cannot be divided equally among {program.ranks} ranks"
        return
    yield from _segment("queues", program.queues, len(program.queues.offsets) - 1)
    for name in ("totals_first", "totals_middle", "totals_last"):
        if getattr(program, name).shape != (program.ranks, program.counters):
            yield f"{name}: shape {getattr(program, name).shape}, not ({program.ranks}, {program.counters})"


def check_layout(program: Program) -> Iterator[str]:
    """Check arrays and sizes, on which all later checks rely."""
    dims = program.dims
    found = list(check_arrays(program))
    yield from found
    if found:
        return
    if program.ranks >= bits.OWNER:
        yield f"{program.ranks} ranks do not fit a signal word"
    if program.ranks != dims.tp or dims.rank != 0:
        yield f"a program of {program.ranks} ranks has the sizes of rank {dims.rank} of {dims.tp} instead of rank 0"
    if program.workers > MOST_WORKERS:
        yield f"{program.workers} workers of a rank are more than {MOST_WORKERS}"
    if (dims.layers + 1) * program.counters > MOST_COUNTERS:
        yield f"{dims.layers + 1} blocks of {program.counters} counters are more than {MOST_COUNTERS}"
    if program.counters > bits.COUNTER_MASK:
        yield f"a block of {program.counters} counters does not fit a wait or signal word"
    if dims.layers > bits.MOST_LAYERS:
        yield f"{dims.layers} layers are more than {bits.MOST_LAYERS}"
    yield from _sizes(dims)


def _sizes(d: Dims) -> Iterator[str]:
    """Check that sizes are in range and fit each other. All phases and step tables rely on these checks."""
    counts = ("vocab", "hidden", "ffn", "heads", "kv_heads", "head_dim", "kv_page", "row_block", "tokens", "logit_rows")
    low = [name for name in (*counts, "max_seqs", "max_context", "attention_slots") if getattr(d, name) < 1]
    if low:
        yield f"{', '.join(low)} must be at least 1"
        return
    more = ("max_seqs", "max_context", "attention_slots", "items", "partials", "bias_entries", "mask_rows", "kv_block")
    high = [name for name in (*counts, *more) if getattr(d, name) > MOST]
    if high or max(d.heads * d.head_dim, d.tp * (d.tokens + d.row_block), d.tokens + d.row_block) > MOST:
        yield f"{', '.join(high) or 'a product of sizes'} must be at most {MOST}"
        return
    if (words := step_words(d)) > MOST_STEP_WORDS:
        yield f"a step table of {words} words is longer than {MOST_STEP_WORDS}"
    known = d.dtype in (Dtype.F32, Dtype.BF16) and d.units in list(Units) and d.replicated_o in (0, 1)
    known = known and d.replicated_residual in (0, 1) and d.quantised_kv in (0, 1)
    if not known or d.ring_pages < 0 or (d.ring_pages and d.units == Units.CORE):
        yield f"dtype {d.dtype}, units {d.units}, a ring of {d.ring_pages} pages or a flag is out of range"
    if d.sms not in ((1, 2) if d.units == Units.TENSOR else (1,)):
        yield f"workers of {d.sms} SMs are not possible: a worker has one, or two where matrix units compute"
    if d.heads % d.kv_heads or d.head_dim % 2:
        yield f"{d.heads} heads of {d.head_dim} elements do not fit {d.kv_heads} KV heads and RoPE pairs"
    if d.kv_block < 1 or d.kv_block % d.kv_page:
        yield f"pages of {d.kv_page} tokens do not divide KV blocks of {d.kv_block}"
    # A step can need this many attention items, because an item begins wherever a sequence, the padding rows or a row
    # block begins.
    items = min(d.tokens, d.row_blocks + d.max_seqs)
    if d.items < items or d.partials < 0 or d.bias_entries < 0 or d.mask_rows < 0:
        yield f"{d.items} attention items, {d.partials} partials: at least {items} and 0 are needed"


def _segment(name: str, segment: Segment, streams: int) -> Iterator[str]:
    shape, offsets = segment.records.shape, segment.offsets
    if len(shape) != 2 or shape[1] != bits.WORDS:
        yield f"{name}: records have shape {shape}, not [n, {bits.WORDS}]"
        return
    ends = offsets.shape == (streams + 1,) and offsets[0] == 0 and offsets[-1] == shape[0]
    if not ends or (offsets[1:] < offsets[:-1]).any():
        yield f"{name}: offsets are not monotone from 0 to {shape[0]} over {streams} streams or queues"


def check_records(program: Program, parts: list[Part]) -> Iterator[str]:
    """Check each record by itself, except the buffer regions that it accesses. Then check all attention instructions
    together, and all drains together.
    """
    dims = all_dims(program.dims)
    for number, part in enumerate(parts):
        yield from _headers(part, number)
        yield from _operands(part, dims)
        yield from _counters(part)
    yield from _attention(program, parts[1], dims)
    yield from _drains(program, parts[1])


def each(part: Part, rows: Iterable[np.intp] | Ints, what: str) -> Iterator[str]:
    """Yield a violation, described by `what`, for each of some rows of a part."""
    for row in rows:
        yield f"{part.label(int(row))}: {what}"


def _headers(part: Part, segment: int) -> Iterator[str]:
    known, home = part.phases.known[part.number], part.phases.segment[part.number]
    yield from each(part, np.nonzero(~known)[0], "the program has no such phase")
    yield from each(part, np.nonzero(part.records[:, 0] != part.number)[0], "word 0 holds more than a phase number")
    for row in np.nonzero((home >= 0) & (home != segment))[0]:
        yield f"{part.label(int(row))}: belongs in the {SEGMENTS[home[row]]}"
    drains = part.rows(DRAIN)
    yield from each(part, drains[part.queue[drains] >= 0], "a queue cannot hold a drain")


def _operands(part: Part, dims: list[Dims]) -> Iterator[str]:
    values = part.records[:, bits.OPERAND_WORD : bits.WAIT_WORD]
    bad = ((values < part.phases.least[part.number]) | (values > part.phases.most[part.number])).any(axis=1)
    yield from each(part, np.nonzero(bad)[0], "an operand is out of range")
    for phase in part.phases.matmuls:
        rows = part.rows(phase)
        if not len(rows):
            continue
        columns = phase.columns(part.records[rows])
        most = np.array([phase.width(d) for d in dims])[part.rank[rows]]
        bad = columns["col"].astype(np.int64) + columns["cols"] > most
        yield from each(part, rows[bad], "its column tile lies outside the rank's part of the output")
        if phase.result is Result.HEADS:
            unit, what = (dims[0].head_dim, "head") if phase.whole_heads(dims[0]) else (2, "RoPE pair")
            bad = (columns["col"] % unit != 0) | (columns["cols"] % unit != 0)
            yield from each(part, rows[bad], f"its column tile cuts a {what}")


def _counters(part: Part) -> Iterator[str]:
    program, dims = part.program, part.program.dims
    for words, signal in ((part.waits, False), (part.signals, True)):
        what = "signal" if signal else "wait"
        bad = (words.raw & ~np.int32(_KNOWN_BITS) != 0) | (words.counter < 0) | (words.counter >= program.counters)
        yield from each(part, words.row[bad], f"a {what} names no counter of the block of {program.counters}")
        if signal:
            owner = words.rank == bits.OWNER
            bad = (words.rank >= program.ranks) & (words.rank != bits.ALL_RANKS) & ~owner
            yield from each(part, words.row[bad], "a signal names no rank")
            bad = owner & ~words.indexed
            yield from each(part, words.row[bad], "only an indexed signal can go to a row's owner")
            if owner.any() and dims.replicated_residual:
                yield from each(part, words.row[owner], "a signal goes to a row's owner, but all ranks keep all rows")
            if part.name != "body":
                yield from each(part, words.row[words.next], "only the body signals the next block")
        else:
            yield from each(part, words.row[words.rank != 0], "a wait names a rank, but is always on the own rank")
            yield from each(part, words.row[words.next], "a wait names the next block, but must name its own")
        if words.indexed.any():
            row = words.row[words.indexed]
            attends = np.isin(row, part.rows(part.phases.attention))
            # A grid of counters has one counter for each row block. If attention items wait for the grid, it has one
            # counter for each row block and group of KV heads.
            members = np.where(attends & (not signal), part.records[row, _GROUPS].astype(np.int64), 1)
            picks = attends | np.isin(part.number[row], [] if signal else part.phases.logit_norms)
            bad = ~picks | (words.slot[words.indexed] != 0)
            yield from each(part, row[bad], f"a {what} word here cannot be indexed")
            past = ~bad & (words.counter[words.indexed] + members * dims.row_blocks > program.counters)
            yield from each(part, row[past], f"its {what} grid runs past the block of {program.counters} counters")


def _attention(program: Program, body: Part, dims: list[Dims]) -> Iterator[str]:
    """Check the attention instructions. The step table may give any item to any of a rank's
    attention instructions, so all of them must name the same grids of counters.
    """
    phase = body.phases.attention
    if phase is None:
        return
    every = body.rows(phase)
    for words, what in ((body.waits, "wait"), (body.signals, "signal")):
        grid = np.zeros(len(body.records), dtype=np.bool_)
        grid[words.row[words.indexed & (words.slot == 0)]] = True
        yield from each(body, every[~grid[every]], f"its {what} word 0 must name a grid")
    for rank, d in enumerate(dims):
        rows = every[body.rank[every] == rank]
        columns = phase.columns(body.records[rows])
        if not d.rank_heads:
            yield from each(body, rows, f"rank {rank} has no heads")
            continue
        slots = np.sort(columns["slot"])
        if not np.array_equal(slots, np.arange(d.attention_slots)):
            yield f"{phase.name}: rank {rank} has slots {slots.tolist()}, not each of 0..{d.attention_slots - 1} once"
        heads = columns["group_heads"]
        bad = (heads < 1) | (columns["groups"] != -(-d.rank_kv_heads // np.maximum(heads, 1)))
        yield from each(body, rows[bad], f"its groups do not cover {d.rank_kv_heads} KV heads")
        same = body.records[rows][:, [bits.OPERAND_WORD + 1, bits.WAIT_WORD, bits.SIGNAL_WORD]]
        yield from each(
            body, rows[(same != same[:1]).any(axis=1)], "its grids differ from those of the rank's first attention"
        )


def _drains(program: Program, body: Part) -> Iterator[str]:
    """Check that drains name queues of their own rank, do not claim more records than exist, and together claim all of
    them.
    """
    rows = body.rows(DRAIN)
    lengths = np.diff(program.queues.offsets).astype(np.int64)
    columns = DRAIN.columns(body.records[rows])
    bad = (columns["queue"] < 0) | (columns["queue"] >= program.rank_queues)
    yield from each(body, rows[bad], f"its queue does not exist: its rank has {program.rank_queues} queues")
    if bad.any():
        return
    queue = body.rank[rows] * program.rank_queues + columns["queue"]
    bad = (columns["end"] < 0) | (columns["end"] > lengths[queue])
    yield from each(body, rows[bad], "its end lies outside its queue")
    claimed = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(claimed, queue, columns["end"])
    for q in np.nonzero(claimed < lengths)[0]:
        row = int(body.static + program.queues.offsets[q] + claimed[q])
        yield f"{body.label(row)}: no drain of its rank claims it"
