"""Runs a program on symbols: what each instruction reads and writes is a hash, and workers advance in any order.

It shares nothing with the scheduler: it knows the records, the counters' rule, how queues are claimed and the
instruction table. If two orders that the counters allow could give different results, hashes differ from those of
plain program order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from megakernel.isa import BUFFERS, BY_OPCODE, EVERY, OWN, Buffer, Index, Instruction, Kind, item_columns
from megakernel.isa.record import ALL_RANKS, INDEXED, NEXT, OWNER, SIGNAL_WORD, WAIT_WORD, word_counter, word_rank

PRIME = (1 << 61) - 1


class Failure(AssertionError):
    """A deadlock, a wrong total or a result that depends on the order."""


class Item:
    def __init__(self, row, rows, head, heads, start, first_block, blocks, split, splits):
        self.row, self.rows, self.head, self.heads = row, rows, head, heads
        self.start = start  # first row of its sequence in this step; -1: padding
        self.first_block, self.blocks = first_block, blocks
        self.split, self.splits = split, splits  # (id, number), how many


class Table:
    """A random valid step: sequences, each rank's attention items dealt to slots in any order, logit rows."""

    def __init__(self, dims, rng):
        live = int(rng.integers(1, dims.tokens + 1))
        cuts = sorted({0, live, *rng.integers(0, live + 1, size=int(rng.integers(0, 4))).tolist()})
        runs = [(a, b, a) for a, b in itertools.pairwise(cuts)] + [(live, dims.tokens, -1)]
        self.slots = []
        for rank in range(dims.tp):
            slots = defaultdict(list)
            for item in self._items(replace(dims, rank=rank), runs, rng):
                slots[int(rng.integers(dims.attention_slots))].append(item)
            self.slots.append(slots)
        self.logit_rows = rng.integers(-1, dims.tokens, size=dims.logit_rows).tolist()

    def _items(self, dims, runs, rng):
        items, splits, kv_heads = [], 0, dims.rank_kv_heads
        for begin, b, start in runs if kv_heads else ():
            a = begin
            while a < b:
                block = a // dims.row_block
                end = min(b, (block + 1) * dims.row_block, a + int(rng.integers(1, dims.row_block + 1)))
                cut_heads = rng.integers(0, kv_heads + 1, size=int(rng.integers(0, kv_heads + 1)))
                heads = sorted({0, kv_heads, *cut_heads.tolist()})
                first = block if start < 0 else start // dims.row_block
                for h, h_end in itertools.pairwise(heads):
                    n = int(rng.integers(1, 4)) if start >= 0 else 1
                    for k in range(n):
                        split = (splits, k)
                        items.append(Item(a, end - a, h, h_end - h, start, first, block - first + 1, split, n))
                    splits += 1
                a = end
        rng.shuffle(items)
        return items


def mix(*values: int) -> int:
    out = 17
    for value in values:
        out = (out * 1_000_003 + int(value) + 12345) % PRIME
    return out


BODY, QUEUES = 1, 3
Key = tuple[int, int, int]  # segment, counter block, record


class Run:
    """One launch. Streams advance in pieces: an instruction, an attention item, a claim; results are in `state` and
    `read`."""

    def __init__(self, program, table, instructions: Mapping[int, Instruction] = BY_OPCODE):
        self.program, self.dims, self.table = program, program.dims, table
        self.instructions = instructions
        self.totals = program.totals()
        self.values = np.zeros_like(self.totals)
        self.state: dict[tuple[int, int, int], np.ndarray] = {}
        self.read: dict[Key, int] = {}
        self.partials: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
        self.segments = (program.prologue, program.body, program.epilogue, program.queues)
        self.rank_of = [self._ranks(segment) for segment in self.segments]
        self.touched = [
            [self._accesses(r, rank) for r, rank in zip(s.records, ranks, strict=True)]
            for s, ranks in zip(self.segments, self.rank_of, strict=True)
        ]
        self.runs = [(0, 0), *((BODY, layer) for layer in range(self.dims.layers)), (2, self.dims.layers)]
        self.streams: list[list[Key]] = []
        for s in range(program.ranks * program.workers):
            stream = []
            for segment, block in self.runs:
                offsets = self.segments[segment].offsets
                stream += [(segment, block, i) for i in range(offsets[s], offsets[s + 1])]
            self.streams.append(stream)
        self.at = [0] * len(self.streams)
        self.claim: list[Key | None] = [None] * len(self.streams)
        self.claimed: dict[tuple[int, int], int] = defaultdict(int)  # (queue of all ranks, layer)
        self.item: dict[Key, int] = defaultdict(int)

    def _ranks(self, segment):
        """The rank of each record."""
        each = max(1, (len(segment.offsets) - 1) // self.program.ranks)
        return np.repeat(np.arange(len(segment.offsets) - 1) // each, np.diff(segment.offsets))

    def _accesses(self, record, rank):
        instruction = self.instructions[int(record[0]) & 0xFF]
        dims = replace(self.dims, rank=int(rank))
        return instruction, instruction.accesses(instruction.columns(record[None]), dims), dims

    def _record(self, key):
        return self.segments[key[0]].records[key[2]]

    # -- counters

    def _reached(self, rank, word, block, member=0):
        counter = block + (1 if word & NEXT else 0), rank, int(word_counter(np.int32(word))) + member
        return self.values[counter] >= self.totals[counter]

    def _add(self, word, block, row_block=0, count=1):
        """One signal; `row_block` picks the member of a grid."""
        to = int(word_rank(np.int32(word)))
        ranks = range(self.dims.tp) if to == ALL_RANKS else [row_block % self.dims.tp if to == OWNER else to]
        member = row_block if word & INDEXED else 0
        for rank in ranks:
            self.values[block + (1 if word & NEXT else 0), rank, int(word_counter(np.int32(word))) + member] += count

    def _items(self, key):
        return self.table.slots[self.rank_of[key[0]][key[2]]][int(self._record(key)[1])]

    def _owns(self, dims, token):
        return dims.tp == 1 or dims.one_hop or token // dims.row_block % dims.tp == dims.rank

    def _waits_met(self, key):
        segment, block, i = key
        record = self._record(key)
        instruction, _, dims = self.touched[segment][i]
        for word in record[WAIT_WORD : WAIT_WORD + 8].tolist():
            if word == 0:
                continue
            if not word & INDEXED:
                if not self._reached(dims.rank, word, block):
                    return False
            elif instruction.name == "attention":
                _, group_heads, groups = record[1:4].tolist()
                items = self._items(key)
                if self.item[key] == len(items):
                    continue
                it = items[self.item[key]]
                for b in range(it.first_block, it.first_block + it.blocks):
                    for g in range(it.head // group_heads, -(-(it.head + it.heads) // group_heads)):
                        if not self._reached(dims.rank, word, block, b * groups + g):
                            return False
            else:
                row, rows = record[1:3].tolist()
                for token in self.table.logit_rows[row : row + rows]:
                    picked = token >= 0 and self._owns(dims, token)
                    if picked and not self._reached(dims.rank, word, block, token // dims.row_block):
                        return False
        return True

    # -- symbols

    def _array(self, rank, buffer, block):
        layer = block if BUFFERS[buffer].layered else 0
        key = rank, buffer, layer
        if key not in self.state:
            d = self.dims
            rows = d.tp * d.own_rows if buffer is Buffer.REDUCE else max(d.tokens, d.logit_rows)
            self.state[key] = np.zeros((rows, max(d.hidden, d.ffn, d.vocab, d.heads * d.head_dim)), object)
        return self.state[key]

    def _see(self, rank, buffer, block, rows, cols):
        cells = self._array(rank, buffer, block)[rows[0] : rows[1], cols[0] : cols[1]].ravel()
        return mix(*(mix(k, c) for k, c in enumerate(cells)))

    def _write(self, access, dims, block, rows, cols, value):
        if access.rank is None:
            ranks = [rows[0] // dims.row_block % dims.tp]
        else:
            rank = int(access.rank if isinstance(access.rank, int) else access.rank[0])
            ranks = range(dims.tp) if rank == EVERY else [dims.rank if rank == OWN else rank]
        for rank in ranks:
            self._array(rank, access.buffer, block)[rows[0] : rows[1], cols[0] : cols[1]] = value

    def _plain(self, key):
        segment, block, i = key
        instruction, accesses, dims = self.touched[segment][i]
        boxes = [(a, (int(a.row[0]), int(a.row_end[0])), (int(a.col[0]), int(a.col_end[0]))) for a in accesses]
        seen = [self._see(dims.rank, a.buffer, block, r, c) for a, r, c in boxes if a.kind is not Kind.WRITE]
        value = mix(instruction.opcode, dims.rank, block, *self._record(key)[1:16].tolist(), *seen)
        self.read[key] = value
        for a, r, c in boxes:
            if a.kind is not Kind.READ:
                self._write(a, dims, block, r, c, value)

    def _final_norm(self, key):
        segment, block, i = key
        _, (x, y), dims = self.touched[segment][i]
        row, rows = self._record(key)[1:3].tolist()
        cols = int(x.col[0]), int(x.col_end[0])
        values = []
        for n, token in enumerate(self.table.logit_rows[row : row + rows], row):
            if self._owns(dims, token) if token >= 0 else y.index is not Index.LOGIT_OWNER or dims.rank == 0:
                seen = self._see(dims.rank, x.buffer, 0, (token, token + 1), cols) if token >= 0 else 0
                values.append(mix(14, n, seen))
                self._write(y, dims, block, (n, n + 1), cols, values[-1])
        self.read[key] = mix(*values)

    def _attention_item(self, key, it):
        segment, block, i = key
        _, accesses, d = self.touched[segment][i]
        seen = []
        for a in accesses:
            cols = item_columns(a.buffer, d, it.head, it.head + it.heads)
            if a.kind is not Kind.WRITE and it.start >= 0:
                first = it.row if a.buffer is Buffer.Q else it.start
                seen.append(self._see(d.rank, a.buffer, block, (first, it.row + it.rows), cols))
        number, k = it.split
        parts = self.partials[d.rank, block, number]
        parts[k] = mix(4, d.rank, block, number, k, *seen)
        if len(parts) == it.splits:
            value = mix(*(parts[n] for n in range(it.splits)))
            for a in accesses:
                if a.kind is Kind.WRITE:
                    cols = item_columns(a.buffer, d, it.head, it.head + it.heads)
                    self._write(a, d, block, (it.row, it.row + it.rows), cols, value)
            for word in self._record(key)[SIGNAL_WORD : SIGNAL_WORD + 8].tolist():
                if word & INDEXED:
                    self._add(word, block, it.row // d.row_block, it.rows * it.heads)

    # -- running

    def _execute(self, key):
        """Run the next piece of an instruction. Whether it is done."""
        segment, block, i = key
        name = self.touched[segment][i][0].name
        if name == "attention":
            items = self._items(key)
            if self.item[key] < len(items):
                self._attention_item(key, items[self.item[key]])
                self.item[key] += 1
                if self.item[key] < len(items):
                    return False
        elif name == "final_norm":
            self._final_norm(key)
        else:
            self._plain(key)
        for word in self._record(key)[SIGNAL_WORD : SIGNAL_WORD + 8].tolist():
            if word and not word & INDEXED:
                self._add(word, block)
        return True

    def _head(self, s):
        return self.claim[s] or self.streams[s][self.at[s]]

    def _advance(self, s):
        if self.claim[s]:
            self.claim[s] = None if self._execute(self.claim[s]) else self.claim[s]
            return
        segment, block, i = key = self.streams[s][self.at[s]]
        if self.touched[segment][i][0].name == "drain":
            queue, end = self._record(key)[1:3].tolist()
            queue += self.program.rank_queues * int(self.rank_of[segment][i])
            if self.claimed[queue, block] < end:
                record = int(self.program.queues.offsets[queue]) + self.claimed[queue, block]
                self.claimed[queue, block] += 1
                self.claim[s] = (QUEUES, block, record)
                return
        self.at[s] += self._execute(key)

    def interleaved(self, pick: Callable[[list[int]], int]) -> Run:
        """Advance workers as `pick` chooses among those that may run, to the end."""
        while True:
            left = [s for s, stream in enumerate(self.streams) if self.at[s] < len(stream)]
            if not left:
                break
            ready = [s for s in left if self._waits_met(self._head(s))]
            if not ready:
                raise Failure(f"deadlock: {[self._head(s) for s in left]}")
            self._advance(pick(ready))
        if not np.array_equal(self.values, self.totals):
            raise Failure(f"totals differ at {np.argwhere(self.values != self.totals)[:5].tolist()}")
        for queue in range(len(self.program.queues.offsets) - 1):
            length = int(np.diff(self.program.queues.offsets)[queue])
            if any(self.claimed[queue, layer] != length for layer in range(self.dims.layers)):
                raise Failure(f"queue {queue} is not drained")
        return self

    def in_order(self) -> Run:
        """Phase after phase, heedless of counters: the meaning of the program."""
        keys = [
            (segment, block, i)
            for run, block in self.runs
            for segment in ((BODY, QUEUES) if run == BODY else (run,))
            for i in range(len(self.segments[segment].records))
        ]
        # Blocks: prologue 0, layers 0.., epilogue L. The prologue's block equals layer 0's; segments break the tie.
        keys.sort(key=lambda k: (k[1], BODY if k[0] == QUEUES else k[0], self.touched[k[0]][k[2]][0].opcode))
        for key in keys:
            while not self._execute(key):
                pass
        return self

    def same_as(self, other: Run) -> None:
        for key, value in other.read.items():
            if self.read[key] != value:
                segment, block, i = key
                instruction, _, dims = self.touched[segment][i]
                where = f"record {i}, block {block}, rank {dims.rank}"
                raise Failure(f"{instruction.name} ({where}) read something else than in program order")
        for key, cells in other.state.items():
            if not np.array_equal(self.state[key], cells):
                raise Failure(f"{key[1].name} of rank {key[0]} differs at the end")


def check(program, seed, rounds=4, instructions=BY_OPCODE):
    """Compare program order with random orders and with orders that always favour some workers."""
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        table = Table(program.dims, rng)
        expected = Run(program, table, instructions).in_order()
        rank = rng.permutation(program.ranks * program.workers).tolist()
        favoured = number % 2 == 1

        def pick(ready, rank=rank, favoured=favoured):
            return min(ready, key=rank.__getitem__) if favoured else ready[int(rng.integers(len(ready)))]

        Run(program, table, instructions).interleaved(pick).same_as(expected)
