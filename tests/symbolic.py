"""Runs a program on symbols: what each instruction reads and writes is a hash, and workers advance in any order.

It shares nothing with the scheduler: it knows the records, the counters' rule and the instruction table. If
two orders that the counters allow could give different results, hashes differ from those of plain program order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from megakernel.isa import BUFFERS, BY_OPCODE, Buffer, Index, Instruction, Kind
from megakernel.isa.record import INDEXED, NEXT, SIGNAL_WORD, WAIT_WORD, word_counter

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
    """A random valid step: sequences, attention items dealt to slots in any order, logit rows."""

    def __init__(self, dims, rng):
        live = int(rng.integers(1, dims.tokens + 1))
        cuts = sorted({0, live, *rng.integers(0, live + 1, size=int(rng.integers(0, 4))).tolist()})
        runs = [(a, b, a) for a, b in itertools.pairwise(cuts)] + [(live, dims.tokens, -1)]
        items, splits = [], 0
        for a, b, start in runs:
            while a < b:
                block = a // dims.row_block
                end = min(b, (block + 1) * dims.row_block, a + int(rng.integers(1, dims.row_block + 1)))
                cut_heads = rng.integers(0, dims.kv_heads + 1, size=int(rng.integers(0, dims.kv_heads + 1)))
                heads = sorted({0, dims.kv_heads, *cut_heads.tolist()})
                first = block if start < 0 else start // dims.row_block
                for h, h_end in itertools.pairwise(heads):
                    n = int(rng.integers(1, 4)) if start >= 0 else 1
                    for k in range(n):
                        split = (splits, k)
                        items.append(Item(a, end - a, h, h_end - h, start, first, block - first + 1, split, n))
                    splits += 1
                a = end
        rng.shuffle(items)
        self.slots = defaultdict(list)
        for item in items:
            self.slots[int(rng.integers(dims.attention_slots))].append(item)
        self.logit_rows = rng.integers(-1, dims.tokens, size=dims.logit_rows).tolist()


def mix(*values: int) -> int:
    out = 17
    for value in values:
        out = (out * 1_000_003 + int(value) + 12345) % PRIME
    return out


class Run:
    """One launch. `step` runs the next piece of a worker's stream; results are in `state` and `read`."""

    def __init__(self, program, table, instructions: Mapping[int, Instruction] = BY_OPCODE):
        self.program, self.dims, self.table = program, program.dims, table
        self.instructions = instructions
        self.totals = program.totals()
        self.values = np.zeros_like(self.totals)
        self.state: dict[tuple[int, int], np.ndarray] = {}
        self.read: dict[tuple[int, int, int], int] = {}
        self.partials: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self.streams = []
        self.records = (program.prologue, program.body, program.epilogue)
        self.touched = [self._accesses(s.records) for s in self.records]
        runs = [(0, 0), *((1, layer) for layer in range(self.dims.layers)), (2, self.dims.layers)]
        for s in range(program.ranks * program.workers):
            stream = []
            for segment, block in runs:
                offsets = self.records[segment].offsets
                stream += [(segment, block, i) for i in range(offsets[s], offsets[s + 1])]
            self.streams.append(stream)
        self.at = [0] * len(self.streams)
        self.item = [0] * len(self.streams)

    def _accesses(self, records):
        out = []
        for record in records:
            instruction = self.instructions[int(record[0]) & 0xFF]
            accesses = instruction.accesses(instruction.columns(record[None]), self.dims)
            out.append((instruction, accesses))
        return out

    # -- counters

    def _counters(self, word, block, member=0):
        return block + (1 if word & NEXT else 0), int(word_counter(np.int32(word))) + member

    def _reached(self, word, block, member=0):
        counter = self._counters(word, block, member)
        return self.values[counter] >= self.totals[counter]

    def _items(self, record):
        return self.table.slots[int(record[1])]

    def _waits_met(self, s):
        segment, block, i = self.streams[s][self.at[s]]
        record = self.records[segment].records[i]
        instruction, _ = self.touched[segment][i]
        for word in record[WAIT_WORD : WAIT_WORD + 8].tolist():
            if word == 0:
                continue
            if not word & INDEXED:
                if not self._reached(word, block):
                    return False
            elif instruction.name == "attention":
                _, group_heads, groups = record[1:4].tolist()
                items = self._items(record)
                if self.item[s] == len(items):
                    continue
                it = items[self.item[s]]
                for b in range(it.first_block, it.first_block + it.blocks):
                    for g in range(it.head // group_heads, -(-(it.head + it.heads) // group_heads)):
                        if not self._reached(word, block, b * groups + g):
                            return False
            else:
                row, rows = record[1:3].tolist()
                for token in self.table.logit_rows[row : row + rows]:
                    if token >= 0 and not self._reached(word, block, token // self.dims.row_block):
                        return False
        return True

    def _signal(self, record, block):
        for word in record[SIGNAL_WORD : SIGNAL_WORD + 8].tolist():
            if word and not word & INDEXED:
                self.values[self._counters(word, block)] += 1

    # -- symbols

    def _array(self, buffer, block):
        layer = block if BUFFERS[buffer].layered else 0
        if (buffer, layer) not in self.state:
            d = self.dims
            self.state[buffer, layer] = np.zeros(
                (max(d.tokens, d.logit_rows), max(d.hidden, d.ffn, d.vocab, d.q_cols)), object
            )
        return self.state[buffer, layer]

    def _see(self, buffer, block, rows, cols):
        cells = self._array(buffer, block)[rows[0] : rows[1], cols[0] : cols[1]].ravel()
        return mix(*(mix(k, c) for k, c in enumerate(cells)))

    def _plain(self, segment, block, i, extra=0):
        instruction, accesses = self.touched[segment][i]
        record = self.records[segment].records[i]
        boxes = [(a, (int(a.row[0]), int(a.row_end[0])), (int(a.col[0]), int(a.col_end[0]))) for a in accesses]
        boxes = [b for b in boxes if b[0].index is Index.NONE]
        seen = [self._see(a.buffer, block, r, c) for a, r, c in boxes if a.kind is not Kind.WRITE]
        value = mix(instruction.opcode, block, *record[1:16].tolist(), *seen, extra)
        self.read[segment, block, i] = value
        for a, r, c in boxes:
            if a.kind is not Kind.READ:
                self._array(a.buffer, block)[r[0] : r[1], c[0] : c[1]] = value

    def _attention_item(self, segment, block, i, it):
        _, accesses = self.touched[segment][i]
        d = self.dims
        seen = []
        write = None
        for a in accesses:
            per_head = int(a.col_end[0]) // d.kv_heads
            cols = (it.head * per_head, (it.head + it.heads) * per_head)
            rows = (it.row, it.row + it.rows)
            if a.kind is Kind.WRITE:
                write = (a.buffer, rows, cols)
            elif it.start >= 0:
                first = it.row if a.buffer is Buffer.Q else it.start
                seen.append(self._see(a.buffer, block, (first, rows[1]), cols))
        number, k = it.split
        parts = self.partials[block, number]
        parts[k] = mix(4, block, number, k, *seen)
        if len(parts) == it.splits:
            value = mix(*(parts[n] for n in range(it.splits)))
            buffer, rows, cols = write
            self._array(buffer, block)[rows[0] : rows[1], cols[0] : cols[1]] = value
            for word in self.records[segment].records[i][SIGNAL_WORD : SIGNAL_WORD + 8].tolist():
                if word & INDEXED:
                    self.values[self._counters(word, block, it.row // d.row_block)] += it.rows * it.heads

    # -- running

    def _execute(self, s):
        segment, block, i = self.streams[s][self.at[s]]
        instruction, _ = self.touched[segment][i]
        record = self.records[segment].records[i]
        if instruction.name == "attention":
            items = self._items(record)
            if self.item[s] < len(items):
                self._attention_item(segment, block, i, items[self.item[s]])
                self.item[s] += 1
                if self.item[s] < len(items):
                    return
            self.item[s] = 0
        elif instruction.name == "final_norm":
            x = next(a for (a,) in zip(self.touched[segment][i][1]) if a.index is Index.LOGIT_ROW)
            row, rows = record[1:3].tolist()
            tokens = [t for t in self.table.logit_rows[row : row + rows] if t >= 0]
            self._plain(
                segment, block, i, mix(*(self._see(x.buffer, 0, (t, t + 1), (0, int(x.col_end[0]))) for t in tokens))
            )
        else:
            self._plain(segment, block, i)
        self._signal(record, block)
        self.at[s] += 1

    def interleaved(self, pick: Callable[[list[int]], int]) -> Run:
        """Advance workers as `pick` chooses among those that may run, to the end."""
        while True:
            left = [s for s, stream in enumerate(self.streams) if self.at[s] < len(stream)]
            if not left:
                break
            ready = [s for s in left if self._waits_met(s)]
            if not ready:
                raise Failure(f"deadlock: {[self.streams[s][self.at[s]] for s in left]}")
            self._execute(pick(ready))
        if not np.array_equal(self.values, self.totals):
            raise Failure(f"totals differ at {np.argwhere(self.values != self.totals)[:5].tolist()}")
        return self

    def in_order(self) -> Run:
        """Phase after phase, heedless of counters: the meaning of the program."""
        todo = sorted(
            (block, segment, self.touched[segment][i][0].opcode, s, n)
            for s, stream in enumerate(self.streams)
            for n, (segment, block, i) in enumerate(stream)
        )
        # Blocks: prologue 0, layers 0.., epilogue L. The prologue's block equals layer 0's; segments break the tie.
        for _, _, _, s, n in todo:
            self.at[s] = n
            self._execute(s)
            while self.at[s] == n:
                self._execute(s)
        return self

    def same_as(self, other: Run) -> None:
        for key, value in other.read.items():
            if self.read[key] != value:
                segment, block, i = key
                name = self.touched[segment][i][0].name
                raise Failure(f"{name} (record {i}, block {block}) read something else than in program order")
        for key, cells in other.state.items():
            if not np.array_equal(self.state[key], cells):
                raise Failure(f"{key[0].name} differs at the end")


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
