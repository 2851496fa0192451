"""Programs as streams of atomic steps, and what the steps do to data: what `ground_truth` interleaves.

A step is an instruction, or one attention item, with the counters it waits for, the counters it adds to and the boxes
it touches, for one valid step table. It shares no code with the verifier or the scheduler: it knows the records and
the program's phases.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from megakernel.isa import (
    BUFFERS,
    CONTROL,
    DRAIN,
    EVERY,
    OWN,
    Access,
    Buffer,
    Dims,
    Forward,
    Index,
    Kind,
    Operation,
    Rows,
    accesses,
    item_columns,
)
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.program import Program

LAUNCHES = 2
_PRIME = (1 << 61) - 1


class Wild(Exception):
    """A step that leaves its buffers, counters or ranks: unsafe whatever the order."""


@dataclass(frozen=True)
class Item:
    """Attention work: rows [row, row + rows) of the sequence that starts at token row `start` (-1: padding), some KV
    heads of the rank; `part` of `parts` of split `split`."""

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
    """One valid step: each rank's items by slot, and the token row of each logit row."""

    slots: list[dict[int, list[Item]]]
    logit_rows: list[int]


def make_table(dims: Dims, seed: int) -> Table:
    """A random valid step: sequences anywhere, items dealt to slots in any order, any logit rows."""
    rng = np.random.default_rng(seed)
    live = int(rng.integers(1, dims.tokens + 1))
    cuts = sorted({0, live, *rng.integers(0, live + 1, size=int(rng.integers(0, 3))).tolist()})
    runs = [(a, b, a) for a, b in itertools.pairwise(cuts)] + [(live, dims.tokens, -1)]
    slots: list[dict[int, list[Item]]] = []
    for rank in range(dims.tp):
        kv_heads = replace(dims, rank=rank).rank_kv_heads
        items: list[Item] = []
        splits = 0
        for first, b, start in runs:
            a = first
            while a < b and kv_heads:
                end = min(b, (a // dims.row_block + 1) * dims.row_block, a + int(rng.integers(1, dims.row_block + 1)))
                heads = sorted({0, kv_heads, *rng.integers(0, kv_heads + 1, size=1).tolist()})
                for h, h_end in itertools.pairwise(heads):
                    parts = int(rng.integers(1, 3)) if start >= 0 else 1
                    items += [Item(a, end - a, h, h_end - h, start, splits, k, parts) for k in range(parts)]
                    splits += 1
                a = end
        by_slot: dict[int, list[Item]] = defaultdict(list)
        for i in rng.permutation(len(items)):
            by_slot[int(rng.integers(dims.attention_slots))].append(items[i])
        slots.append(by_slot)
    return Table(slots, rng.integers(-1, dims.tokens, size=dims.logit_rows).tolist())


Box = tuple[int, int, int, int, int]  # copy (numbers a buffer, layer and rank), row, row_end, col, col_end


@dataclass
class Step:
    """`waits`: counters that must have their totals; `adds`: (counter, arrivals)."""

    name: str
    tag: tuple[int, ...]
    waits: tuple[int, ...]
    adds: list[tuple[int, int]]
    reads: list[Box] = field(default_factory=list)
    writes: list[Box] = field(default_factory=list)
    split: tuple[int, ...] | None = None  # attention: (rank, layer, split), part, parts
    queue: tuple[int, int] | None = None  # drain: queue, end


class Model:
    """Streams of steps, [rank * workers + worker], and queues by (rank, layer, queue), of one launch."""

    def __init__(self, program: Program, table: Table) -> None:
        self.program, self.table, self.dims = program, table, program.dims
        self.rank_dims = [replace(program.dims, rank=r) for r in range(program.ranks)]
        self.block = program.ranks * program.counters
        self.totals = program.totals().reshape(-1).astype(np.int64)
        self.copies: dict[tuple[Buffer, int, int], int] = {}
        self.shapes: list[tuple[int, int]] = []
        layers = self.dims.layers
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

    # -- from records to steps

    def steps(self, record: Records, rank: int, block: int, layer: int) -> Iterator[Step]:
        """The steps of a record of a rank; of attention its items, and then what it does for all of them."""
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
            raise Wild("an indexed wait without an index")
        if any(w & rec.INDEXED for w in signals) and not attention:
            raise Wild("an indexed signal without an index")
        tag = (phase.number, block, rank, *operands)
        try:
            boxes_of = accesses(phase, phase.columns(record[None]), dims)
        except (AssertionError, IndexError, KeyError) as e:
            raise Wild(f"{phase.name} touches nothing that can be") from e
        if attention:
            yield from self._items(record, boxes_of, tag, plain, rank, block, layer)
            boxes_of = []
        step = Step(phase.name, tag, tuple(plain), adds)
        if phase is DRAIN:
            queue, end = operands
            if not (0 <= queue < self.program.rank_queues):
                raise Wild("a drain of no queue")
            if not 0 <= end <= len(self.program.queues.stream(rank * self.program.rank_queues + queue)):
                raise Wild("a drain beyond its queue")
            if block == dims.layers:
                raise Wild("a drain outside the body")
            step.queue = (queue, end)
        picked: list[int] = []
        if logit_norm:
            row, rows = operands
            if row < 0 or rows < 1 or row + rows > dims.logit_rows:
                raise Wild("logit rows")
            # Padding is rank 0's, as the first row is.
            picked = [i for i in range(row, row + rows) if rank in dims.owners(max(self.table.logit_rows[i], 0))]
            members = [self.table.logit_rows[i] // dims.row_block for i in picked if self.table.logit_rows[i] >= 0]
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
                        raise Wild("a box turned inside out")
        yield step

    def _items(
        self, record: Records, boxes_of: list[Access], tag, plain, rank: int, block: int, layer: int
    ) -> Iterator[Step]:
        dims = self.rank_dims[rank]
        slot, group_heads, groups = record[rec.OPERAND_WORD : rec.OPERAND_WORD + 3].tolist()
        if not 0 <= slot < dims.attention_slots or group_heads < 1:
            raise Wild("attention operands")
        words = rec.waits(record), rec.signals(record)
        waits, signals = ([w for w in found if w & rec.INDEXED] for found in words)
        for it in self.table.slots[rank].get(slot, []):
            first = (it.row if it.start < 0 else it.start) // dims.row_block
            member = it.row // dims.row_block
            heads = range(it.head // group_heads, (it.head + it.heads - 1) // group_heads + 1)
            members = [b * groups + g for b in range(first, member + 1) for g in heads]
            grid = [self._counter(w, rank, block, m) for w in waits for m in members]
            adds = [(c, it.rows * it.heads) for w in signals for c in self._targets(w, rank, block, member)]
            # The instruction's operands say what to wait for; what is computed is the item's.
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
        return list(range(self.dims.tp)) if rank == EVERY else [int(rank)]

    def _targets(self, word, rank: int, block: int, member: int = 0) -> list[int]:
        target = int(rec.word_rank(word))
        if target == rec.ALL_RANKS:
            ranks = range(self.program.ranks)
        elif target == rec.OWNER:
            if not word & rec.INDEXED:
                raise Wild("an owner of no row")
            ranks = (member % self.program.ranks,)
        else:
            ranks = (target,)
        return [self._counter(word, r, block, member) for r in ranks]

    def _counter(self, word, rank: int, block: int, member: int = 0) -> int:
        block += 1 if word & rec.NEXT else 0
        counter = int(rec.word_counter(word)) + member
        if not (0 <= counter < self.program.counters and rank < self.program.ranks and block <= self.dims.layers):
            raise Wild("a word names no counter")
        return block * self.block + rank * self.program.counters + counter

    def _box(self, buffer: Buffer, layer: int, rank: int, box: tuple[int, int, int, int]) -> Box:
        if not 0 <= rank < self.program.ranks:
            raise Wild("a rank that is not there")
        dims = self.rank_dims[rank]
        key = (buffer, layer if BUFFERS[buffer].layered else 0, rank)
        if key not in self.copies:
            if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
                shape = (dims.tokens, dims.kv_cols)
            else:
                rows, *cols = BUFFERS[buffer].shape(dims, 0)
                shape = (rows, cols[0] if cols else 1)
            self.copies[key] = len(self.shapes)
            self.shapes.append(shape)
        copy = self.copies[key]
        rows, cols = self.shapes[copy]
        if not (0 <= box[0] <= box[1] <= rows and 0 <= box[2] <= box[3] <= cols):
            raise Wild(f"a box outside {buffer.name}")
        return (copy, *box)


# -- data


class Data:
    """Contents of all copies: a hash for each element. `seen`: what each step has read, by launch, tag and part."""

    def __init__(self, model: Model) -> None:
        self.arrays = [np.zeros(shape, np.int64) for shape in model.shapes]
        self.written = [np.full(shape, -1, np.int8) for shape in model.shapes]  # in which launch
        self.parts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        self.seen: dict[tuple[object, ...], int] = {}
        self.undefined = ""  # something that was read, or left for the host, and that nothing before it wrote

    def execute(self, step: Step, launch: int) -> None:
        """Do a step's work; where a later part of its split is left, that one writes."""
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
        """Whether all of it was written in a launch."""
        copy, r0, r1, c0, c1 = box
        return bool((self.written[copy][r0:r1, c0:c1] == launch).all())

    def outputs(self, model: Model) -> list[bytes]:
        """What outlives a launch: sampled tokens, and K and V."""
        kept = (*_SAMPLED, Buffer.K_CACHE, Buffer.V_CACHE)
        keys = sorted((int(b), layer, rank) for b, layer, rank in model.copies if b in kept)
        return [self.arrays[model.copies[Buffer(b), layer, rank]].tobytes() for b, layer, rank in keys]


_SAMPLED = (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT)


def in_order(model: Model) -> Data:
    """What a right program does: phase after phase, heedless of counters."""
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
            if copy is None or not data.has((copy, 0, model.dims.logit_rows, 0, 1), launch):
                data.undefined = "not every row is sampled"
    return data


@dataclass(frozen=True)
class Right:
    """Outputs of a right program, and the phases that it has."""

    forward: Forward
    outputs: list[bytes]


def expected(program: Program, table: Table) -> Right:
    """What a program's own phases make of a step, whatever its counters say. Wild where they make no sense."""
    model = Model(program, table)
    data = in_order(model)
    if data.undefined:
        raise Wild(data.undefined)
    return Right(program.forward, data.outputs(model))
