"""What a program really does: every interleaving of a small one, adversarial ones of a larger.

The judge of the verifier, sharing no code with it or with the scheduler: it knows the records, the counters' rule
and the instruction table. A program becomes streams of atomic steps (an instruction, or one attention item), each with
the counters it waits for, the counters it adds to and the boxes it touches. What counters allow depends on how far
each stream is and on nothing else, so every reachable state can be visited. If no reachable state lets two steps run
whose boxes conflict, all interleavings give the same data, and one of them tells whether it is the right data. Two
launches run back to back, a rank starting its second when its own streams have ended the first.

A stream may begin steps before the one it is at has ended, in order, as soon as their counters have their totals, and
claim from a queue whose drain is the next step. What it has begun adds to no counter, so the states are the same; but
steps of one stream may conflict too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from megakernel.isa import BUFFERS, BY_OPCODE, EVERY, OWN, Buffer, Dims, Index, Kind, item_columns
from megakernel.isa.record import (
    ALL_RANKS,
    INDEXED,
    NEXT,
    OPERAND_WORD,
    OWNER,
    SIGNAL_WORD,
    SIGNALS,
    WAIT_WORD,
    WAITS,
    word_counter,
    word_rank,
)
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
    updates: bool = False
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
            [step for segment, block, layer in runs for step in self._steps(segment.stream(s), s, block, layer)]
            for s in range(program.ranks * program.workers)
        ]
        self.queues = {
            (rank, layer, q): [
                list(self._steps(record[None], rank * program.workers, layer, layer))
                for record in program.queues.stream(rank * program.rank_queues + q)
            ]
            for rank in range(program.ranks)
            for layer in range(layers)
            for q in range(program.rank_queues)
        }
        if any(step.queue for queue in self.queues.values() for record in queue for step in record):
            raise Wild("a drain in a queue")

    # -- from records to steps

    def _steps(self, records, stream: int, block: int, layer: int) -> Iterator[Step]:
        for record in records:
            rank = stream // self.program.workers
            opcode = int(record[0]) & 0xFF
            if opcode not in BY_OPCODE or int(record[0]) != opcode:
                raise Wild(f"opcode {record[0]}")
            yield from self._instruction(record, BY_OPCODE[opcode], rank, block, layer)

    def _instruction(self, record, instruction, rank: int, block: int, layer: int) -> Iterator[Step]:
        dims = self.rank_dims[rank]
        operands = record[OPERAND_WORD : OPERAND_WORD + len(instruction.operands)].tolist()
        waits = record[WAIT_WORD : WAIT_WORD + WAITS]
        signals = record[SIGNAL_WORD : SIGNAL_WORD + SIGNALS]
        plain = [self._counter(w, rank, block) for w in waits if w and not w & INDEXED]
        adds = [(c, 1) for w in signals if w and not w & INDEXED for c in self._targets(w, rank, block)]
        if any(w & INDEXED for w in waits) and instruction.name not in ("attention", "final_norm"):
            raise Wild("an indexed wait without an index")
        if any(w & INDEXED for w in signals) and instruction.name != "attention":
            raise Wild("an indexed signal without an index")
        tag = (instruction.opcode, block, rank, *operands)
        columns = instruction.columns(record[None])
        accesses = instruction.accesses(columns, dims)
        if instruction.name == "attention":
            yield from self._attention(record, accesses, tag, plain, rank, block, layer)
            yield Step("attention", tag, tuple(plain), adds)
            return
        step = Step(instruction.name, tag, tuple(plain), adds)
        if instruction.name == "drain":
            queue, end = operands
            if not (0 <= queue < self.program.rank_queues):
                raise Wild("a drain of no queue")
            if not 0 <= end <= len(self.program.queues.stream(rank * self.program.rank_queues + queue)):
                raise Wild("a drain beyond its queue")
            step.queue = (queue, end)
        picked: list[int] = []
        if instruction.name == "final_norm":
            row, rows = operands
            if row < 0 or rows < 1 or row + rows > dims.logit_rows:
                raise Wild("logit rows")
            picked = [i for i in range(row, row + rows) if self._mine(dims, self.table.logit_rows[i])]
            members = [self.table.logit_rows[i] // dims.row_block for i in picked if self.table.logit_rows[i] >= 0]
            grid = [self._counter(w, rank, block, m) for w in waits if w & INDEXED for m in members]
            step.waits += tuple(grid)
            step.tag += tuple(picked)
        for a in accesses:
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

    def _attention(self, record, accesses, tag, plain, rank: int, block: int, layer: int) -> Iterator[Step]:
        dims = self.rank_dims[rank]
        slot, group_heads, groups = record[OPERAND_WORD : OPERAND_WORD + 3].tolist()
        if not 0 <= slot < dims.attention_slots or group_heads < 1:
            raise Wild("attention operands")
        waits, signals = record[WAIT_WORD : WAIT_WORD + WAITS], record[SIGNAL_WORD : SIGNAL_WORD + SIGNALS]
        for it in self.table.slots[rank].get(slot, []):
            first = (it.row if it.start < 0 else it.start) // dims.row_block
            blocks = range(first, it.row // dims.row_block + 1)
            heads = range(it.head // group_heads, (it.head + it.heads - 1) // group_heads + 1)
            grid = [
                self._counter(w, rank, block, b * groups + g)
                for w in waits
                if w & INDEXED
                for b in blocks
                for g in heads
            ]
            member = it.row // dims.row_block
            adds = [
                (c, it.rows * it.heads) for w in signals if w & INDEXED for c in self._targets(w, rank, block, member)
            ]
            # The instruction's operands say what to wait for; what is computed is the item's.
            step = Step("item", (*tag[:3], it.row, it.head, it.split), tuple(plain) + tuple(grid), adds)
            step.split = (rank, layer, it.split, it.part, it.parts)
            for a in accesses:
                cols = item_columns(a.buffer, dims, it.head, it.head + it.heads)
                if a.kind is Kind.READ:
                    if it.start >= 0:
                        low = it.row if a.buffer is Buffer.Q else it.start
                        step.reads.append(self._box(a.buffer, layer, rank, (low, it.row + it.rows, *cols)))
                else:
                    owner = member % dims.tp
                    for target in (owner,) if a.rank is None else self._ranks(a.rank, rank):
                        step.writes.append(self._box(a.buffer, layer, target, (it.row, it.row + it.rows, *cols)))
            yield step

    def _mine(self, dims: Dims, token: int) -> bool:
        if dims.one_hop or dims.tp == 1:
            return True
        return dims.rank == (token // dims.row_block % dims.tp if token >= 0 else 0)

    def _ranks(self, rank, own: int) -> list[int]:
        if rank is None or isinstance(rank, np.ndarray):
            rank = int(rank[0])
        if rank == OWN:
            return [own]
        return list(range(self.dims.tp)) if rank == EVERY else [int(rank)]

    def _targets(self, word, rank: int, block: int, member: int = 0) -> list[int]:
        target = int(word_rank(word))
        if target == ALL_RANKS:
            ranks = range(self.program.ranks)
        elif target == OWNER:
            if not word & INDEXED:
                raise Wild("an owner of no row")
            ranks = (member % self.program.ranks,)
        else:
            ranks = (target,)
        return [self._counter(word, r, block, member) for r in ranks]

    def _counter(self, word, rank: int, block: int, member: int = 0) -> int:
        block += 1 if word & NEXT else 0
        counter = int(word_counter(word)) + member
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
    """Contents of all copies: a hash for each element."""

    def __init__(self, model: Model) -> None:
        self.arrays = [np.zeros(shape, np.int64) for shape in model.shapes]
        self.parts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)

    def execute(self, step: Step, launch: int) -> bool:
        """Do a step's work; False where its arrivals are left to a later part of the split."""
        seen = hash((launch, step.tag, tuple(self._digest(b) for b in step.reads))) % _PRIME
        if step.split is not None:
            *key, part, parts = step.split
            done = self.parts[(launch, *key)]
            done[part] = seen
            if len(done) < parts:
                return False
            seen = hash(tuple(done[n] for n in range(parts))) % _PRIME
        for copy, r0, r1, c0, c1 in step.writes:
            self.arrays[copy][r0:r1, c0:c1] = seen
        return True

    def _digest(self, box: Box) -> int:
        copy, r0, r1, c0, c1 = box
        return hash(self.arrays[copy][r0:r1, c0:c1].tobytes())

    def outputs(self, model: Model) -> list[bytes]:
        """What outlives a launch: sampled tokens, and K and V."""
        kept = (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT, Buffer.K_CACHE, Buffer.V_CACHE)
        keys = sorted((int(b), layer, rank) for b, layer, rank in model.copies if b in kept)
        return [self.arrays[model.copies[Buffer(b), layer, rank]].tobytes() for b, layer, rank in keys]


def expected(program: Program, table: Table) -> list[bytes]:
    """Outputs of a right program: phase after phase in the table's order, heedless of counters."""
    model = Model(program, table)
    steps: list[tuple[int, int, int, Step]] = []
    for s, stream in enumerate(model.streams):
        steps += [(step.tag[1], step.tag[0], s, step) for step in stream]
    for queue in model.queues.values():
        steps += [(step.tag[1], step.tag[0], 0, step) for record in queue for step in record]
    prologue = min(i.opcode for i in BY_OPCODE.values() if i.layered)
    steps.sort(key=lambda s: (s[0] + (s[1] >= prologue), s[1], s[2]))
    data = Data(model)
    for launch in range(LAUNCHES):
        for _, _, _, step in steps:
            data.execute(step, launch)
    return data.outputs(model)


# -- interleavings


@dataclass(frozen=True)
class State:
    """How far everything is: per stream (launch and position), per stream the queue record it has claimed and how
    far, per queue the records claimed."""

    at: tuple[int, ...]
    inner: tuple[tuple[int, int], ...]  # (record, step) or (-1, 0)
    heads: tuple[int, ...]  # of each (launch, rank, layer, queue)


@dataclass(frozen=True)
class Verdict:
    """`safe` is None where not every interleaving was tried and none failed."""

    safe: bool | None
    why: str
    states: int


class Explorer:
    def __init__(self, program: Program, table: Table) -> None:
        self.model = Model(program, table)
        self.program = program
        self.lengths = [len(s) for s in self.model.streams]
        self.queue_keys = list(self.model.queues)
        self.start = State(
            (0,) * len(self.lengths),
            ((-1, 0),) * len(self.lengths),
            (0,) * (LAUNCHES * len(self.queue_keys)),
        )
        self._conflicts: dict[tuple[int, int], bool] = {}

    def steps(self, state: State, counters: np.ndarray) -> list[tuple[int, Step, int]]:
        """(stream, step, launch) that may run now."""
        out = []
        for s, at in enumerate(state.at):
            launch, position = divmod(at, max(self.lengths[s], 1)) if self.lengths[s] else (LAUNCHES, 0)
            if launch == LAUNCHES or (launch and position == 0 and not self._rank_done(state, s, launch)):
                continue
            step = self.model.streams[s][position]
            if step.queue is not None:
                inner = self._claimed(state, s, step, launch)
                if inner is None:
                    out.append((s, step, launch))  # the drain is over
                    continue
                step = inner
            if all(counters[c] >= (launch + 1) * self.model.totals[c] for c in step.waits):
                out.append((s, step, launch))
        return out

    def ahead(self, state: State, s: int, counters: np.ndarray) -> Iterator[tuple[int, Step]]:
        """(position, step) that stream `s` may begin although the step that it is at, which may run, has not ended."""
        launch, position = divmod(state.at[s], self.lengths[s])
        if self.model.streams[s][position].queue is not None:
            return  # what a queue holds is in no order with what follows the drain
        for at in range(position + 1, self.lengths[s]):
            step = self.model.streams[s][at]
            if step.queue is not None or any(counters[c] < (launch + 1) * self.model.totals[c] for c in step.waits):
                return
            yield launch * self.lengths[s] + at, step

    def _rank_done(self, state: State, s: int, launch: int) -> bool:
        w = self.program.workers
        first = s // w * w
        return all(state.at[i] >= launch * self.lengths[i] for i in range(first, first + w))

    def _head(self, s: int, step: Step, launch: int) -> int:
        rank, layer = s // self.program.workers, step.tag[1]
        return launch * len(self.queue_keys) + self.queue_keys.index((rank, layer, step.queue[0]))

    def _claimed(self, state: State, s: int, step: Step, launch: int) -> Step | None:
        """The step of a queue record that stream `s` runs or would claim next; None: nothing is left for it."""
        head = self._head(s, step, launch)
        queue = self.model.queues[self.queue_keys[head % len(self.queue_keys)]]
        record, at = state.inner[s]
        if record < 0:
            record = state.heads[head]
            if record >= step.queue[1]:
                return None
        return queue[record][at]

    def advance(self, state: State, s: int, launch: int) -> State:
        step = self.model.streams[s][state.at[s] % self.lengths[s]]
        at, inner, heads = list(state.at), list(state.inner), list(state.heads)
        if step.queue is not None and self._claimed(state, s, step, launch) is not None:
            head = self._head(s, step, launch)
            record, done = inner[s]
            if record < 0:
                record = heads[head]
                heads[head] += 1
            queue = self.model.queues[self.queue_keys[head % len(self.queue_keys)]]
            done += 1
            inner[s] = (-1, 0) if done == len(queue[record]) else (record, done)
            return State(state.at, tuple(inner), tuple(heads))
        at[s] += 1
        return State(tuple(at), state.inner, state.heads)

    def claim(self, state: State, s: int, launch: int) -> State:
        """A blocked record is claimed all the same."""
        step = self._drain(state, s)
        assert step is not None
        inner, heads = list(state.inner), list(state.heads)
        head = self._head(s, step, launch)
        inner[s] = (heads[head], 0)
        heads[head] += 1
        return State(state.at, tuple(inner), tuple(heads))

    def claims(self, state: State) -> list[tuple[int, int]]:
        out = []
        for s, at in enumerate(state.at):
            if not self.lengths[s] or at >= LAUNCHES * self.lengths[s]:
                continue
            launch, position = divmod(at, self.lengths[s])
            if launch and position == 0 and not self._rank_done(state, s, launch):
                continue
            drain = self._drain(state, s)
            if drain and state.inner[s][0] < 0 and self._claimed(state, s, drain, launch) is not None:
                out.append((s, launch))
        return out

    def _drain(self, state: State, s: int) -> Step | None:
        """The drain from which stream `s` may claim: the step that it is at, or the next one of its launch."""
        position = state.at[s] % self.lengths[s]
        for step in self.model.streams[s][position : position + 2]:
            if step.queue is not None:
                return step
        return None

    def conflict(self, a: Step, b: Step) -> bool:
        key = (id(a), id(b))
        if a is b or (a.split and b.split and a.split[:3] == b.split[:3]):
            return False  # either may claim it; of a split's parts only the last to arrive writes
        if key not in self._conflicts:
            self._conflicts[key] = _meet(a.writes, b.writes) or _meet(a.writes, b.reads) or _meet(a.reads, b.writes)
        return self._conflicts[key]


def _meet(a: list[Box], b: list[Box]) -> bool:
    return any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] and x[3] < y[4] and y[3] < x[4] for x in a for y in b)


class _Progress:
    """Counters along a path. Splits: the arrivals come with the part that happens to be last."""

    def __init__(self, explorer: Explorer) -> None:
        self.counters = np.zeros(len(explorer.model.totals), np.int64)
        self.parts: dict[tuple[int, ...], int] = {}

    def copy(self) -> _Progress:
        out = object.__new__(_Progress)
        out.counters, out.parts = self.counters.copy(), dict(self.parts)
        return out

    def add(self, step: Step, launch: int) -> None:
        if step.split is not None:
            *key, _, parts = step.split
            k = (launch, *key)
            self.parts[k] = self.parts.get(k, 0) + 1
            if self.parts[k] < parts:
                return
        for counter, n in step.adds:
            self.counters[counter] += n


def explore(program: Program, table: Table, want: list[bytes], limit: int) -> Verdict:
    """Visit every state that the counters allow, at most `limit`; `want` are the right outputs."""
    try:
        explorer = Explorer(program, table)
    except Wild as e:
        return Verdict(False, str(e), 0)
    seen = {explorer.start}
    stack = [(explorer.start, _Progress(explorer))]
    suspects = 0
    while stack:
        state, progress = stack.pop()
        ready = explorer.steps(state, progress.counters)
        claims = explorer.claims(state)
        for (s, a, _), (t, b, _) in itertools.combinations(ready, 2):
            if explorer.conflict(a, b):
                for order in ((s, t), (t, s)):
                    if run(explorer, np.random.default_rng(1), goal=state, then=order) != want:
                        return Verdict(False, f"race of {a.name} {a.tag} and {b.name} {b.tag}", len(seen))
                suspects += 1
        for s, a, _ in ready:
            for at, b in explorer.ahead(state, s, progress.counters):
                if explorer.conflict(a, b):
                    if run(explorer, np.random.default_rng(1), goal=state, early=(s, at)) != want:
                        return Verdict(False, f"overlap of {a.name} {a.tag} and {b.name} {b.tag}", len(seen))
                    suspects += 1
        if not ready and not claims:
            if any(at < LAUNCHES * n for at, n in zip(state.at, explorer.lengths, strict=True)):
                return Verdict(False, "deadlock", len(seen))
            if not np.array_equal(progress.counters, LAUNCHES * explorer.model.totals):
                return Verdict(False, "totals", len(seen))
            continue
        nexts = [(explorer.advance(state, s, launch), step, launch) for s, step, launch in ready]
        for after, step, launch in nexts:
            if after not in seen:
                seen.add(after)
                moved = progress.copy()
                moved.add(step, launch)
                stack.append((after, moved))
        for s, launch in claims:
            after = explorer.claim(state, s, launch)
            if after not in seen:
                seen.add(after)
                stack.append((after, progress.copy()))
        if len(seen) > limit:
            return Verdict(None, "too many states", len(seen))
    if run(explorer, np.random.default_rng(0)) != want:
        return Verdict(False, "wrong data", len(seen))
    return Verdict(
        True if not suspects else None, "every interleaving" if not suspects else "races without effect", len(seen)
    )


def run(
    explorer: Explorer,
    rng,
    goal: State | None = None,
    then=(),
    early: tuple[int, int] | None = None,
    favour: list[int] | None = None,
    overlap: float = 0.0,
):
    """Outputs of one interleaving; None where it deadlocks or totals are off.

    `goal` is reached first. There streams `then` go on, or the step `early` (stream, position) does its work, long
    before it ends. `overlap`: how often some step that may does so.
    """
    data, progress, state = Data(explorer.model), _Progress(explorer), explorer.start
    todo = list(then)
    done: set[tuple[int, int]] = set()  # steps whose work is done and that have not ended

    def begin(s: int, at: int) -> None:
        launch, position = divmod(at, explorer.lengths[s])
        data.execute(explorer.model.streams[s][position], launch)
        done.add((s, at))

    while True:
        ready = explorer.steps(state, progress.counters)
        claims = explorer.claims(state)
        if not ready and not claims:
            break
        if goal is not None and state == goal:
            goal = None
            if early is not None:
                begin(*early)
        if overlap and ready and rng.random() < overlap:
            s = ready[int(rng.integers(len(ready)))][0]
            waiting = [at for at, _ in explorer.ahead(state, s, progress.counters) if (s, at) not in done]
            if waiting:
                begin(s, waiting[int(rng.integers(len(waiting)))])
        if goal is not None:
            toward = [r for r in ready if _within(explorer.advance(state, r[0], r[2]), goal)]
            if not toward:
                holds = [c for c in claims if _within(explorer.claim(state, *c), goal)]
                if not holds:
                    return None
                state = explorer.claim(state, *holds[0])
                continue
            s, step, launch = toward[0]
        elif todo:
            s = todo.pop(0)
            found = [r for r in ready if r[0] == s]
            if not found:
                todo.clear()
                continue
            s, step, launch = found[0]
        elif not ready or (claims and rng.random() < 0.2):
            state = explorer.claim(state, *claims[int(rng.integers(len(claims)))])
            continue
        elif favour is not None:
            s, step, launch = min(ready, key=lambda r: favour[r[0]])
        else:
            s, step, launch = ready[int(rng.integers(len(ready)))]
        if (s, state.at[s]) in done and step is explorer.model.streams[s][state.at[s] % explorer.lengths[s]]:
            done.remove((s, state.at[s]))
        else:
            data.execute(step, launch)
        progress.add(step, launch)
        state = explorer.advance(state, s, launch)
    if any(at < LAUNCHES * n for at, n in zip(state.at, explorer.lengths, strict=True)):
        return None
    if not np.array_equal(progress.counters, LAUNCHES * explorer.model.totals):
        return None
    return data.outputs(explorer.model)


def _within(state: State, goal: State) -> bool:
    return all(a <= b for a, b in zip(state.at, goal.at, strict=True)) and all(
        a <= b for a, b in zip(state.heads, goal.heads, strict=True)
    )


def adversarial(program: Program, table: Table, want: list[bytes], seed: int, runs: int) -> Verdict:
    """Random interleavings with overlap, and such that always favour some workers."""
    try:
        explorer = Explorer(program, table)
    except Wild as e:
        return Verdict(False, str(e), 0)
    rng = np.random.default_rng(seed)
    for number in range(runs):
        favour = rng.permutation(len(explorer.lengths)).tolist() if number % 2 else None
        if run(explorer, rng, favour=favour, overlap=0.0 if favour else 0.3) != want:
            return Verdict(False, "an adversarial run", number + 1)
    return Verdict(None, "no run failed", runs)
