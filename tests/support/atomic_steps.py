"""Turns programs into streams of atomic steps, which `ground_truth` interleaves, and simulates their effect on data.

A step is one instruction or, of an attention instruction, one work item; one valid step table gives the items. A step
lists the counters that it waits for, the counters that it adds to, and the rectangles of buffers (boxes) that it reads
and writes. This module shares no code with the verifier or the scheduler. It uses only a program's records and phases.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megakernel.isa import BUFFERS, CONTROL, DRAIN, Buffer, Dims, Forward, Operation, Rows, accesses
from megakernel.isa import record as rec
from megakernel.isa.access import EVERY, OWN, Access, Index, Kind, item_columns
from megakernel.isa.record import Records
from megakernel.program import Program

LAUNCHES = 2
_PRIME = (1 << 61) - 1


class Wild(Exception):
    """Raised for a step that addresses a buffer, counter or rank outside its bounds, or that cannot be correct in any
    order of execution."""


@dataclass(frozen=True)
class Item:
    """One attention item: token rows [row, row + rows) and the rank's KV heads [head, head + heads). The rows belong to
    a sequence whose first token row is `start`, or to padding if `start` is -1. The item is number `part` of the
    `parts` items that share the work of split `split`."""

    row: int
    rows: int
    head: int
    heads: int
    start: int
    split: int
    part: int
    parts: int


@dataclass(frozen=True)
class Table:
    """A valid step table. `slots[rank]` has the items of each attention slot, which one attention instruction executes.
    `logit_rows` has the token row of each logit row (-1: padding)."""

    slots: list[dict[int, list[Item]]]
    logit_rows: list[int]


def make_table(dims: Dims, seed: int) -> Table:
    """Return a valid step table: sequence lengths, the slot of each attention item, and logit rows are random."""
    rng = np.random.default_rng(seed)
    live = int(rng.integers(1, dims.bucket.tokens + 1))
    cuts = sorted({0, live, *rng.integers(0, live + 1, size=int(rng.integers(0, 3))).tolist()})
    runs = [(a, b, a) for a, b in itertools.pairwise(cuts)] + [(live, dims.bucket.tokens, -1)]
    slots: list[dict[int, list[Item]]] = []
    for rank in range(dims.split.tp):
        kv_heads = dims.ranks[rank].split.rank_kv_heads
        items: list[Item] = []
        splits = 0
        for first, b, start in runs:
            a = first
            while a < b and kv_heads:
                block = dims.bucket.row_block
                end = min(b, (a // block + 1) * block, a + int(rng.integers(1, block + 1)))
                heads = sorted({0, kv_heads, *rng.integers(0, kv_heads + 1, size=1).tolist()})
                for h, h_end in itertools.pairwise(heads):
                    parts = int(rng.integers(1, 3)) if start >= 0 else 1
                    items += [Item(a, end - a, h, h_end - h, start, splits, k, parts) for k in range(parts)]
                    splits += 1
                a = end
        by_slot: dict[int, list[Item]] = defaultdict(list)
        for i in rng.permutation(len(items)):
            by_slot[int(rng.integers(dims.bucket.attention_slots))].append(items[i])
        slots.append(by_slot)
    return Table(slots, rng.integers(-1, dims.bucket.tokens, size=dims.bucket.logit_rows).tolist())


# (copy, row, row_end, col, col_end). A copy is a buffer of one layer on one rank; `copy` is its number.
Box = tuple[int, int, int, int, int]


@dataclass
class Step:
    """An instruction or attention item. It may begin when the counters in `waits` have reached their totals. When it
    ends, it adds arrivals to counters: `adds` has pairs (counter, number of arrivals)."""

    name: str
    tag: tuple[int, ...]
    waits: tuple[int, ...]
    adds: list[tuple[int, int]]
    reads: list[Box] = field(default_factory=list)
    writes: list[Box] = field(default_factory=list)
    # Only attention items have `split`: (rank, layer, split, part, parts). Only DRAIN instructions, which execute a
    # queue's records, have `queue`: (queue, number of records that are claimed when the instruction ends).
    split: tuple[int, ...] | None = None
    queue: tuple[int, int] | None = None


class Model:
    """The steps of one launch. `streams[rank * workers + worker]` has the steps of a worker, and `queues[rank, layer,
    queue]` has the steps of each record of a queue."""

    def __init__(self, program: Program, table: Table) -> None:
        self.program, self.table, self.dims = program, table, program.dims
        self.rank_dims = [program.dims.ranks[r] for r in range(program.ranks)]
        self.block = program.ranks * program.counters
        self.totals = program.totals().reshape(-1).astype(np.int64)
        self.copies: dict[tuple[Buffer, int, int], int] = {}
        self.shapes: list[tuple[int, int]] = []
        layers = self.dims.model.layers
        runs = [(program.prologue, 0, 0), *((program.body, n, n) for n in range(layers)), (program.epilogue, layers, 0)]
        self.streams = [
            [
                step
                for segment, block, layer in runs
                for record in segment.stream(s)
                for step in self.steps(record, s // program.workers, block, layer)
            ]
            for s in range(program.ranks * program.workers)
        ]
        self.queues = {
            (rank, layer, q): [
                list(self.steps(record, rank, layer, layer))
                for record in program.queues.stream(rank * program.rank_queues + q)
            ]
            for rank in range(program.ranks)
            for layer in range(layers)
            for q in range(program.rank_queues)
        }
        if any(step.queue for queue in self.queues.values() for record in queue for step in record):
            raise Wild("a drain in a queue")

    # -- conversion of records into steps

    def steps(self, record: Records, rank: int, block: int, layer: int) -> Iterator[Step]:
        """Yield the steps of a record: for attention, one step per item and then one for the signals that follow all
        items; otherwise one step."""
        phase = self.program.forward.by_number.get(int(record[0]))
        if phase is None:
            raise Wild(f"phase {record[0]}")
        dims = self.rank_dims[rank]
        attention = phase.operation is Operation.ATTENTION
        logit_norm = phase.operation is Operation.NORM and phase.rows is Rows.LOGIT
        operands = record[rec.OPERAND_WORD : rec.OPERAND_WORD + len(phase.operands)].tolist()
        waits, signals = rec.waits(record), rec.signals(record)
        plain = [self._counter(w, rank, block) for w in waits if w and not w & rec.INDEXED]
        adds = [(c, 1) for w in signals if w and not w & rec.INDEXED for c in self._targets(w, rank, block)]
        if any(w & rec.INDEXED for w in waits) and not (attention or logit_norm):
            raise Wild("an INDEXED wait is in a record that is neither attention nor a norm of logit rows")
        if any(w & rec.INDEXED for w in signals) and not attention:
            raise Wild("an INDEXED signal is in a record that is not attention")
        tag = (phase.number, block, rank, *operands)
        try:
            boxes_of = accesses(phase, phase.columns(record[None]), dims)
        except (AssertionError, IndexError, KeyError) as e:
            raise Wild(f"{phase.name} accesses rows, phases or buffers that do not exist") from e
        if attention:
            yield from self._items(record, boxes_of, tag, plain, rank, block, layer)
            boxes_of = []
        step = Step(phase.name, tag, tuple(plain), adds)
        if phase is DRAIN:
            queue, end = operands
            if not (0 <= queue < self.program.rank_queues):
                raise Wild("a DRAIN record names a queue that does not exist")
            if not 0 <= end <= len(self.program.queues.stream(rank * self.program.rank_queues + queue)):
                raise Wild("a DRAIN record claims more records than its queue has")
            if block == dims.model.layers:
                raise Wild("a DRAIN record is in the epilogue")
            step.queue = (queue, end)
        picked: list[int] = []
        if logit_norm:
            row, rows = operands
            if row < 0 or rows < 1 or row + rows > dims.bucket.logit_rows:
                raise Wild("logit rows")
            # A padding row (-1) has the same owners as token row 0.
            picked = [i for i in range(row, row + rows) if rank in dims.owners(max(self.table.logit_rows[i], 0))]
            live = [row for row in (self.table.logit_rows[i] for i in picked) if row >= 0]
            members = [row // dims.bucket.row_block for row in live]
            grid = [self._counter(w, rank, block, m) for w in waits if w & rec.INDEXED for m in members]
            step.waits += tuple(grid)
            step.tag += tuple(picked)
        for a in boxes_of:
            box = (int(a.row[0]), int(a.row_end[0]), int(a.col[0]), int(a.col_end[0]))
            if a.index is Index.LOGIT_ROW:
                tokens = [self.table.logit_rows[i] for i in picked if self.table.logit_rows[i] >= 0]
                step.reads += [self._box(a.buffer, layer, rank, (t, t + 1, *box[2:])) for t in tokens]
                continue
            boxes = [(i, i + 1, *box[2:]) for i in picked] if a.index is Index.LOGIT_OWNER else [box]
            for target in self._ranks(a.rank, rank):
                for b in boxes:
                    if b[0] < b[1] and b[2] < b[3]:
                        found = self._box(a.buffer, layer, target, b)
                        if a.kind is not Kind.WRITE:
                            step.reads.append(found)
                        if a.kind is not Kind.READ:
                            step.writes.append(found)
                    elif b[0] > b[1] or b[2] > b[3]:
                        raise Wild("a region ends before it begins")
        yield step

    def _items(
        self, record: Records, boxes_of: list[Access], tag, plain, rank: int, block: int, layer: int
    ) -> Iterator[Step]:
        dims = self.rank_dims[rank]
        slot, group_heads, groups = record[rec.OPERAND_WORD : rec.OPERAND_WORD + 3].tolist()
        if not 0 <= slot < dims.bucket.attention_slots or group_heads < 1:
            raise Wild("attention operands")
        words = rec.waits(record), rec.signals(record)
        waits, signals = ([w for w in found if w & rec.INDEXED] for found in words)
        for it in self.table.slots[rank].get(slot, []):
            first = (it.row if it.start < 0 else it.start) // dims.bucket.row_block
            member = it.row // dims.bucket.row_block
            heads = range(it.head // group_heads, (it.head + it.heads - 1) // group_heads + 1)
            members = [b * groups + g for b in range(first, member + 1) for g in heads]
            grid = [self._counter(w, rank, block, m) for w in waits for m in members]
            adds = [(c, it.rows * it.heads) for w in signals for c in self._targets(w, rank, block, member)]
            # The instruction's operands affect only the waits. The item alone determines what is computed, so the tag
            # has the item's row, head and split instead of the operands.
            step = Step("item", (*tag[:3], it.row, it.head, it.split), tuple(plain) + tuple(grid), adds)
            step.split = (rank, layer, it.split, it.part, it.parts)
            for a in boxes_of:
                cols = item_columns(a.buffer, dims, it.head, it.head + it.heads)
                if a.kind is Kind.READ:
                    if it.start >= 0:
                        low = it.row if a.buffer is Buffer.Q else it.start
                        step.reads.append(self._box(a.buffer, layer, rank, (low, it.row + it.rows, *cols)))
                else:
                    for target in [dims.owner(it.row)] if a.rank is None else self._ranks(a.rank, rank):
                        step.writes.append(self._box(a.buffer, layer, target, (it.row, it.row + it.rows, *cols)))
            yield step

    def _ranks(self, rank, own: int) -> list[int]:
        if rank is None or isinstance(rank, np.ndarray):
            rank = int(rank[0])
        if rank == OWN:
            return [own]
        return list(range(self.dims.split.tp)) if rank == EVERY else [int(rank)]

    def _targets(self, word, rank: int, block: int, member: int = 0) -> list[int]:
        target = int(rec.word_rank(word))
        if target == rec.ALL_RANKS:
            ranks = range(self.program.ranks)
        elif target == rec.OWNER:
            if not word & rec.INDEXED:
                raise Wild("a signal goes to the owner of a row, but names no row")
            ranks = (member % self.program.ranks,)
        else:
            ranks = (target,)
        return [self._counter(word, r, block, member) for r in ranks]

    def _counter(self, word, rank: int, block: int, member: int = 0) -> int:
        block += 1 if word & rec.NEXT else 0
        counter = int(rec.word_counter(word)) + member
        if not (0 <= counter < self.program.counters and rank < self.program.ranks and block <= self.dims.model.layers):
            raise Wild("a wait or signal names a counter that does not exist")
        return block * self.block + rank * self.program.counters + counter

    def _box(self, buffer: Buffer, layer: int, rank: int, box: tuple[int, int, int, int]) -> Box:
        if not 0 <= rank < self.program.ranks:
            raise Wild("an instruction accesses a rank that does not exist")
        dims = self.rank_dims[rank]
        key = (buffer, layer if BUFFERS[buffer].layered else 0, rank)
        if key not in self.copies:
            if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                shape = (dims.bucket.tokens, dims.split.kv_cols)
            else:
                rows, *cols = BUFFERS[buffer].shape(dims, 0)
                shape = (rows, cols[0] if cols else 1)
            self.copies[key] = len(self.shapes)
            self.shapes.append(shape)
        copy = self.copies[key]
        rows, cols = self.shapes[copy]
        if not (0 <= box[0] <= box[1] <= rows and 0 <= box[2] <= box[3] <= cols):
            raise Wild(f"a region is outside {buffer.name}")
        return (copy, *box)


# -- data


class Data:
    """The contents of every copy. A copy is a buffer of one layer on one rank; its elements are hashes, not numbers.
    `seen[launch, tag, split]` is a hash of everything that a step has read in a launch; tag and split identify the
    step."""

    def __init__(self, model: Model) -> None:
        self.arrays = [np.zeros(shape, np.int64) for shape in model.shapes]
        # For each element, the last launch that wrote it, or -1.
        self.written = [np.full(shape, -1, np.int8) for shape in model.shapes]
        self.parts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        self.seen: dict[tuple[object, ...], int] = {}
        # Describes an element that a step read, or that the host would read, although no step had written it.
        self.undefined = ""

    def execute(self, step: Step, launch: int) -> None:
        """Execute the reads and writes of a step. Of the parts of a split, only the part executed last writes."""
        seen = hash((launch, step.tag, tuple(self._digest(b) for b in step.reads))) % _PRIME
        self.seen[launch, step.tag, step.split] = seen
        if step.split is not None:
            *key, part, parts = step.split
            done = self.parts[(launch, *key)]
            done[part] = seen
            if len(done) < parts:
                return
            seen = hash(tuple(done[n] for n in range(parts))) % _PRIME
        for copy, r0, r1, c0, c1 in step.writes:
            self.arrays[copy][r0:r1, c0:c1] = seen
            self.written[copy][r0:r1, c0:c1] = launch

    def _digest(self, box: Box) -> int:
        copy, r0, r1, c0, c1 = box
        return hash(self.arrays[copy][r0:r1, c0:c1].tobytes())

    def has(self, box: Box, launch: int) -> bool:
        """Return whether every element of the box was last written in this launch."""
        copy, r0, r1, c0, c1 = box
        return bool((self.written[copy][r0:r1, c0:c1] == launch).all())

    def outputs(self, model: Model) -> list[bytes]:
        """Return the data that outlives a launch: sampled tokens, their log probabilities, and the K and V caches."""
        kept = (*_SAMPLED, Buffer.K_CACHE, Buffer.V_CACHE)
        keys = sorted((int(b), layer, rank) for b, layer, rank in model.copies if b in kept)
        return [self.arrays[model.copies[Buffer(b), layer, rank]].tobytes() for b, layer, rank in keys]


_SAMPLED = (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT)


def in_order(model: Model) -> Data:
    """Return the data after every launch has executed its phases one after another, without regard to counters."""
    steps: list[tuple[int, int, int, Step]] = []
    for s, stream in enumerate(model.streams):
        steps += [(step.tag[1], step.tag[0], s, step) for step in stream]
    for queue in model.queues.values():
        steps += [(step.tag[1], step.tag[0], 0, step) for record in queue for step in record]
    before = {phase.number for phase in (*CONTROL, *model.program.forward.prologue)}
    steps.sort(key=lambda s: (s[0] + (s[1] not in before), s[1], s[2]))
    data = Data(model)
    for launch in range(LAUNCHES):
        for _, _, _, step in steps:
            if not all(data.has(box, launch) for box in step.reads):
                data.undefined = f"{step.name} {step.tag} reads what nothing wrote"
            data.execute(step, launch)
        for copy in [model.copies.get((buffer, 0, 0)) for buffer in _SAMPLED]:
            if copy is None or not data.has((copy, 0, model.dims.bucket.logit_rows, 0, 1), launch):
                data.undefined = "not every row is sampled"
    return data


@dataclass(frozen=True)
class Right:
    """The outputs that a correct program with these phases produces."""

    forward: Forward
    outputs: list[bytes]


def expected(program: Program, table: Table) -> Right:
    """Return the outputs of the program's phases, executed in order without regard to counters. Raises Wild if a phase
    reads data that no step has written, or if a logit row is not sampled."""
    model = Model(program, table)
    data = in_order(model)
    if data.undefined:
        raise Wild(data.undefined)
    return Right(program.forward, data.outputs(model))
