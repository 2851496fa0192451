"""Executes a program's reads and writes under one random interleaving and one random step table.

Ground truth for the verifier, of which it knows nothing: every element of every rank's buffers remembers the phase
that wrote it last, and each access says what it must find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from megakernel.isa import (
    BUFFERS,
    BY_OPCODE,
    EVERY,
    INSTRUCTIONS,
    OWN,
    Access,
    Buffer,
    Dims,
    Family,
    Index,
    Kind,
    Space,
    item_columns,
    record,
)
from megakernel.program import Program

Place = tuple[Buffer, int, int]  # buffer, layer, rank
Box = tuple[int, int, int, int]
PHASES = [i for i in INSTRUCTIONS if i.family is not Family.CONTROL]
FIRST_LAYERED = min(i.opcode for i in PHASES if i.layered)


class Wrong(Exception):
    pass


def ranks_of(access: Access, dims: Dims, at: int = 0) -> list[int]:
    """Whose copy record `at` touches."""
    rank = access.rank if access.rank is None or isinstance(access.rank, int) else int(access.rank[at])
    assert rank is not None
    return list(range(dims.tp)) if rank == EVERY else [dims.rank if rank == OWN else rank]


class State:
    """Versions of all elements: the number of the phase that wrote each last, in the step's sequential meaning."""

    snapshots: dict[int, dict[Place, np.ndarray]]  # before each phase; of `sequential`

    def __init__(self, program: Program) -> None:
        self.dims = [program.rank_dims(rank) for rank in range(program.ranks)]
        self.cells: dict[Place, np.ndarray] = {}
        self.number: dict[tuple[int, int], int] = {}  # of (opcode, layer)
        self.reads: dict[tuple[int, int, Buffer], int] = {}  # the version that a phase must find
        self._number_phases(program)

    def _number_phases(self, program: Program) -> None:
        d = program.dims
        probe = {name: np.ones(1, dtype=np.int32) for i in PHASES for name in i.operands}
        present = [i for i in PHASES if i.present(d)]
        runs = [(i, 0) for i in present if i.opcode < FIRST_LAYERED]
        runs += [(i, layer) for layer in range(d.layers) for i in present if i.layered]
        runs += [(i, d.layers) for i in present if not i.layered and i.opcode > FIRST_LAYERED]
        last: dict[tuple[Buffer, int], int] = {}
        for number, (instruction, layer) in enumerate(runs, start=1):
            self.number[instruction.opcode, layer] = number
            accesses = instruction.accesses(probe, d)
            for a in accesses:
                key = (a.buffer, layer if BUFFERS[a.buffer].layered else 0)
                self.reads[instruction.opcode, layer, a.buffer] = last.get(key, 0)
            for a in accesses:
                if a.kind is not Kind.READ:
                    last[a.buffer, layer if BUFFERS[a.buffer].layered else 0] = number

    def copy(self, buffer: Buffer, layer: int, rank: int) -> np.ndarray:
        d = self.dims[rank]
        if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
            shape: tuple[int, ...] = (d.tokens, d.kv_cols)
        else:
            shape = BUFFERS[buffer].shape(d, 0)
        place = (buffer, layer if BUFFERS[buffer].layered else 0, rank)
        if place not in self.cells:
            self.cells[place] = np.zeros(shape if len(shape) == 2 else (*shape, 1), dtype=np.int64)
        return self.cells[place]

    def touch(self, opcode: int, layer: int, access: Access, rank: int, box: Box, before: State | None) -> None:
        """Check the versions in the box, and write. `before` holds, per phase, what writes must find."""
        r0, r1, c0, c1 = (int(v) for v in box)
        number = self.number[opcode, layer]
        cells = self.copy(access.buffer, layer, rank)[r0:r1, c0:c1]
        where = f"{BY_OPCODE[opcode].name} in layer {layer}: {access.buffer.name}[{r0}:{r1}, {c0}:{c1}] of rank {rank}"
        if access.kind is not Kind.WRITE and (cells != self.reads[opcode, layer, access.buffer]).any():
            raise Wrong(f"{where} reads {cells.tolist()}, not {self.reads[opcode, layer, access.buffer]}")
        if access.kind is not Kind.READ:
            if before is not None:
                place = (access.buffer, layer if BUFFERS[access.buffer].layered else 0, rank)
                found = before.snapshots[number].get(place)
                expected = 0 if found is None else found[r0:r1, c0:c1]
                if (cells != expected).any():
                    raise Wrong(f"{where} overwrites {cells.tolist()}")
            cells[:] = number


def sequential(program: Program) -> State:
    """Versions before each phase when phases run one after the other. Rows that the table picks: all of them."""
    state = State(program)
    state.snapshots = {}
    segments = {"prologue": [program.prologue], "body": [program.body, program.queues], "epilogue": [program.epilogue]}
    per_segment = {
        name: [
            (int(np.searchsorted(s.offsets, i, side="right")) - 1, s, words)
            for s in parts
            for i, words in enumerate(s.records)
        ]
        for name, parts in segments.items()
    }
    for (opcode, layer), number in state.number.items():
        state.snapshots[number] = {place: cells.copy() for place, cells in state.cells.items()}
        instruction = BY_OPCODE[opcode]
        name = "body" if instruction.layered else "prologue" if opcode < FIRST_LAYERED else "epilogue"
        for stream, segment, words in per_segment[name]:
            if words[0] & 0xFF != opcode:
                continue
            rank = stream // (program.rank_queues if segment is program.queues else program.workers)
            d = state.dims[rank]
            for a in instruction.accesses(instruction.columns(words[None]), d):
                if a.kind is Kind.READ:
                    continue
                ranks = range(d.tp) if a.rank is None else ranks_of(a, d)
                for copy in ranks:
                    cells = state.copy(a.buffer, layer, copy)
                    if a.rank is None:
                        for block in range(copy, d.row_blocks, d.tp):
                            rows = slice(block * d.row_block, (block + 1) * d.row_block)
                            cells[rows, a.col[0] : a.col_end[0]] = number
                    else:
                        cells[a.row[0] : a.row_end[0], a.col[0] : a.col_end[0]] = number
    return state


def random_items(dims: Dims, random_: random.Random) -> list[list[tuple[int, int, int, int, int, int]]]:
    """A valid table's (row, rows, head, heads, wait block, wait blocks) per slot of one rank."""
    slots: list[list[tuple[int, int, int, int, int, int]]] = [[] for _ in range(dims.attention_slots)]
    for block in range(dims.row_blocks if dims.rank_heads else 0):
        row, end = block * dims.row_block, min((block + 1) * dims.row_block, dims.tokens)
        while row < end:
            rows, head = random_.randint(1, end - row), 0
            while head < dims.rank_kv_heads:
                heads = random_.randint(1, dims.rank_kv_heads - head)
                first = random_.randint(0, block)
                random_.choice(slots).append((row, rows, head, heads, first, block - first + 1))
                head += heads
            row += rows
    return slots


Step = tuple[Callable[[], bool], Callable[[], None]]  # ready?, do


class _Run:
    def __init__(self, program: Program, seed: int) -> None:
        self.program, self.random = program, random.Random(seed)
        self.state, self.before = State(program), sequential(program)
        self.totals = program.totals()
        self.values = np.zeros_like(self.totals)
        self.claimed = np.zeros((program.dims.layers, program.ranks * max(1, program.rank_queues)), dtype=int)
        self.slots = [random_items(d, self.random) for d in self.state.dims]
        d = program.dims
        self.logit_rows = [self.random.randrange(-1, d.tokens) for _ in range(d.logit_rows)]

    def met(self, block: int, rank: int, counter: int) -> bool:
        return bool(self.values[block, rank, counter] - self.totals[block, rank, counter] >= 0)

    def signal(self, word: int, block: int, member: int = 0, count: int = 1) -> None:
        rank = word >> record.RANK_SHIFT & record.RANK_MASK
        counter = (word & record.COUNTER_MASK) - 1 + member
        tp = self.program.ranks
        ranks = {record.ALL_RANKS: range(tp), record.OWNER: [member % tp]}.get(rank, [rank])
        for to in ranks:
            self.values[block + bool(word & record.NEXT), to, counter] += count

    def steps(self, words: np.ndarray, block: int, rank: int) -> Iterator[Step]:
        """What one run of an instruction does, as parts that may each be interleaved with other workers."""
        opcode, d = int(words[0]) & 0xFF, self.state.dims[rank]
        instruction = BY_OPCODE[opcode]
        columns = instruction.columns(words[None])
        accesses = instruction.accesses(columns, d)
        waits = [int(w) for w in words[record.WAIT_WORD : record.SIGNAL_WORD] if w]
        signals = [int(w) for w in words[record.SIGNAL_WORD :] if w]
        fixed = [(w & record.COUNTER_MASK) - 1 for w in waits if not w & record.INDEXED]
        yield lambda: all(self.met(block, rank, c) for c in fixed), lambda: None
        if instruction.name == "drain":
            queue, end = rank * self.program.rank_queues + int(columns["queue"][0]), int(columns["end"][0])
            while self.claimed[block, queue] < end:
                at = self.claimed[block, queue]
                self.claimed[block, queue] += 1
                yield from self.steps(self.program.queues.stream(queue)[at], block, rank)
        if instruction.name == "attention":
            for item in self.slots[rank][int(columns["slot"][0])]:
                yield self.item(words, block, d, item, accesses)
        if instruction.name == "final_norm":
            for i in range(int(columns["row"][0]), int(columns["row"][0] + columns["rows"][0])):
                yield self.logit(words, block, d, i, accesses)
        else:
            yield lambda: True, lambda: self.plain(opcode, block, d, accesses)
        for w in signals:
            if not w & record.INDEXED:
                yield lambda: True, lambda w=w: self.signal(w, block)  # type: ignore[misc]

    def plain(self, opcode: int, block: int, d: Dims, accesses: list[Access]) -> None:
        for a in accesses:
            if a.index is Index.NONE:
                for rank in ranks_of(a, d):
                    box = (a.row[0], a.row_end[0], a.col[0], a.col_end[0])
                    self.state.touch(opcode, block, a, rank, box, self.before)

    def item(self, words: np.ndarray, block: int, d: Dims, item: tuple[int, ...], accesses: list[Access]) -> Step:
        row, rows, head, heads, first, count = item
        wait, word = int(words[record.WAIT_WORD]), int(words[record.SIGNAL_WORD])
        _, group_heads, groups = (int(v) for v in words[record.OPERAND_WORD : record.OPERAND_WORD + 3])
        waited = range(head // group_heads, (head + heads - 1) // group_heads + 1)
        base = (wait & record.COUNTER_MASK) - 1
        members = [base + b * groups + g for b in range(first, first + count) for g in waited]

        def do() -> None:
            for a in accesses:
                own = a.buffer in (Buffer.Q, Buffer.ATTN)
                r0, r1 = (row, row + rows) if own else (first * d.row_block, row + rows)
                box = (r0, r1, *item_columns(a.buffer, d, head, head + heads))
                for rank in [row // d.row_block % d.tp] if a.rank is None else ranks_of(a, d):
                    self.state.touch(int(words[0]), block, a, rank, box, self.before)
            self.signal(word, block, row // d.row_block, rows * heads)

        return (lambda: all(self.met(block, d.rank, c) for c in members)), do

    def logit(self, words: np.ndarray, block: int, d: Dims, i: int, accesses: list[Access]) -> Step:
        """One logit row: wait for its row block, read, write where it goes."""
        row, wait = self.logit_rows[i], int(words[record.WAIT_WORD])
        dealt = d.tp > 1 and not d.one_hop
        mine = not dealt or (row // d.row_block % d.tp if row >= 0 else 0) == d.rank
        counter = (wait & record.COUNTER_MASK) - 1 + row // d.row_block
        waits = bool(wait & record.INDEXED) and row >= 0 and mine

        def do() -> None:
            for a in accesses if mine else ():
                r = row if a.kind is Kind.READ else i
                for rank in ranks_of(a, d) if r >= 0 else ():
                    self.state.touch(int(words[0]), block, a, rank, (r, r + 1, 0, d.hidden), self.before)

        return (lambda: not waits or self.met(block, d.rank, counter)), do

    def stream(self, index: int) -> Iterator[Step]:
        p, rank = self.program, index // self.program.workers
        runs = [(p.prologue, 0), *((p.body, layer) for layer in range(p.dims.layers)), (p.epilogue, p.dims.layers)]
        for segment, block in runs:
            for words in segment.stream(index):
                yield from self.steps(words, block, rank)

    def run(self) -> None:
        streams = [self.stream(s) for s in range(self.program.ranks * self.program.workers)]
        heads = [next(s, None) for s in streams]
        order = list(range(len(streams)))
        while any(heads):
            if self.random.random() < 0.2:
                self.random.shuffle(order)  # runs of steps on one worker reach further than a fresh draw each time
            for s in order:
                head = heads[s]
                if head is not None and head[0]():
                    head[1]()
                    heads[s] = next(streams[s], None)
                    break
            else:
                raise Wrong("deadlock")
        if (self.values != self.totals).any():
            raise Wrong("a counter did not end at its total")
        d = self.program.dims
        for buffer in (b for b in BUFFERS if BUFFERS[b].space is Space.OUTPUT and b is not Buffer.LOGITS):
            if (self.state.copy(buffer, 0, 0) == 0).any():
                raise Wrong(f"{buffer.name} is not all written")
        lengths = np.diff(self.program.queues.offsets)
        if len(lengths) and (self.claimed != lengths).any():
            raise Wrong(f"queues are not claimed {d.layers} times")


def run_once(program: Program, seed: int) -> str | None:
    """None if every access saw what it must see in one random execution, else what went wrong."""
    try:
        _Run(program, seed).run()
    except Wrong as e:
        return str(e)
    return None
