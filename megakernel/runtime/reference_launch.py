"""One launch of a program, in one thread: streams that advance when their waits hold, and the counters between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .. import trace as tracing
from ..errors import MegakernelError
from ..isa import BY_NAME, BY_OPCODE, StepTable, record
from ..program import Program
from ..trace import Trace, TraceHeader
from .reference_instructions import Context, attend

_ATTENTION = BY_NAME["attention"]
_FINAL_NORM = BY_NAME["final_norm"]


class Counters:
    """A program's counters. Monotone: launch k waits for value - k * total >= 0, modulo 2^32."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.totals = program.totals().reshape(-1).astype(np.int64)
        self.reset()

    def reset(self) -> None:
        self.values = np.zeros(self.program.total_counters, np.int64)
        self.launch = 0

    def expected(self, counter: int) -> int:
        return self.launch * int(self.totals[counter])

    def met(self, counter: int) -> bool:
        return (int(self.values[counter]) - self.expected(counter)) % 2**32 < 2**31

    def check_totals(self) -> None:
        """Raise MegakernelError unless every counter got exactly its total in every launch so far."""
        wrong = np.flatnonzero(self.values != self.launch * self.totals)
        if len(wrong):
            n = int(wrong[0])
            got = int(self.values[n]) - (self.launch - 1) * int(self.totals[n])
            raise MegakernelError(
                f"program {self.program.hash} is wrong: counter {n} got {got} arrivals, its total is {self.totals[n]}"
            )


@dataclass(frozen=True)
class _Place:
    """An instruction of an unrolled stream. `block` is its counter block, and its layer inside the body."""

    worker: int
    layer: int  # as in a trace: PROLOGUE or EPILOGUE outside the body
    block: int
    row: int
    words: NDArray[np.int32]

    @property
    def opcode(self) -> int:
        return int(record.opcode(self.words))

    def operand(self, name: str) -> int:
        return int(self.words[record.OPERAND_WORD + BY_OPCODE[self.opcode].operands.index(name)])

    def waits(self, *, indexed: bool) -> list[int]:
        return self._list(record.WAIT_WORD, record.WAITS, indexed)

    def signals(self, *, indexed: bool) -> list[int]:
        return self._list(record.SIGNAL_WORD, record.SIGNALS, indexed)

    def _list(self, first: int, count: int, indexed: bool) -> list[int]:
        return [int(w) for w in self.words[first : first + count] if w and bool(w & record.INDEXED) == indexed]

    def __str__(self) -> str:
        names = {tracing.PROLOGUE: "the prologue", tracing.EPILOGUE: "the epilogue"}
        where = names.get(self.layer, f"layer {self.layer}")
        return f"worker {self.worker} at {BY_OPCODE[self.opcode].name} (record {self.row} of {where})"


def _stream(program: Program, worker: int) -> Iterator[_Place]:
    layers = program.dims.layers
    runs = [(program.prologue, tracing.PROLOGUE, 0)]
    runs += [(program.body, layer, layer) for layer in range(layers)]
    runs += [(program.epilogue, tracing.EPILOGUE, layers)]
    for segment, layer, block in runs:
        for i, words in enumerate(segment.stream(worker)):
            yield _Place(worker, layer, block, int(segment.offsets[worker]) + i, words)


@dataclass(frozen=True)
class Blocked:
    """A stream that cannot go on, and why."""

    place: _Place
    counter: int
    value: int
    expected: int

    def __str__(self) -> str:
        return f"{self.place} waits for counter {self.counter}: {self.value} of {self.expected}"


class Launch:
    """Runs one step of `program`. `execute` does an instruction's work, given its words and its layer."""

    def __init__(
        self,
        program: Program,
        table: StepTable,
        counters: Counters,
        execute: Callable[[NDArray[np.int32], int], None],
        context: Callable[[int], Context],
    ) -> None:
        self._program, self._table, self._counters = program, table, counters
        self._execute, self._context = execute, context
        self._intervals: list[tuple[int, ...]] = []

    def run(self, order: np.random.Generator | None) -> None:
        """Advance all streams to their ends, in turn or in random order, or say where they are stuck."""
        workers = [self._worker(w) for w in range(self._program.workers)]
        done = object()
        while workers:
            turn = range(len(workers)) if order is None else order.permutation(len(workers))
            states: dict[int, object] = {int(i): next(workers[i], done) for i in turn}
            blocked = [state for state in states.values() if isinstance(state, Blocked)]
            if len(blocked) == len(workers):
                raise MegakernelError("deadlock: " + "; ".join(str(b) for b in blocked))
            workers = [w for i, w in enumerate(workers) if states[i] is not done]
        self._counters.check_totals()

    def trace(self) -> Trace:
        """What ran when: one COMPUTE interval for each instruction, or for each attention item."""
        columns = np.array(self._intervals, np.int64).reshape(-1, 5).T
        intervals = np.zeros(len(self._intervals), tracing.DTYPE)
        for name, column in zip(("begin", "end", "instruction", "worker", "layer"), columns, strict=True):
            intervals[name] = column
        intervals["launch"] = 1
        intervals["kind"] = tracing.IntervalKind.COMPUTE
        intervals.sort(order=("rank", "worker", "begin"))
        header = TraceHeader(self._program.hash, "reference", 1e-9, 0.0, 0.0, 0)
        return Trace(header, intervals)

    def _worker(self, worker: int) -> Iterator[Blocked | None]:
        """A worker's stream. Yields None after each piece of work, and what it waits for where it cannot go on."""
        for place in _stream(self._program, worker):
            yield from self._wait(place, place.waits(indexed=False))
            if place.opcode == _ATTENTION.opcode:
                slot = place.operand("slot")
                for item in range(*self._table.slot_items[slot : slot + 2]):
                    yield from self._wait(place, place.waits(indexed=True), self._item_members(place, item))
                    if self._timed(place, partial(attend, self._context(place.block), item)):
                        self._signal_rows(place, item)
                    yield None
            else:
                yield from self._wait(place, place.waits(indexed=True), self._logit_row_members(place))
                layer = min(place.block, self._program.dims.layers - 1)
                self._timed(place, partial(self._execute, place.words, layer))
            for word in place.signals(indexed=False):
                self._counters.values[self._counter(place, word)] += 1
            yield None

    def _item_members(self, place: _Place, item: int) -> list[int]:
        """The item's members of the grid [row block][group]: its row blocks, its KV heads' groups."""
        t = self._table
        first = int(t.item_kv_head[item])
        last = first + int(t.item_kv_heads[item]) - 1
        groups = range(first // place.operand("group_heads"), last // place.operand("group_heads") + 1)
        blocks = range(t.item_wait_block[item], t.item_wait_block[item] + t.item_wait_blocks[item])
        return [block * place.operand("groups") + group for block in blocks for group in groups]

    def _logit_row_members(self, place: _Place) -> list[int]:
        """final_norm's members of the grid [row block]: the blocks of its logit rows."""
        if place.opcode != _FINAL_NORM.opcode:
            return []
        row = place.operand("row")
        rows = self._table.logit_rows[row : row + place.operand("rows")]
        return [int(r) // self._program.dims.row_block for r in rows if r >= 0]

    def _signal_rows(self, place: _Place, item: int) -> None:
        member = int(self._table.item_row[item]) // self._program.dims.row_block
        for word in place.signals(indexed=True):
            arrivals = self._table.item_rows[item] * self._table.item_kv_heads[item]
            self._counters.values[self._counter(place, word) + member] += arrivals

    def _counter(self, place: _Place, word: int) -> int:
        block = place.block + bool(word & record.NEXT)
        return block * self._program.counters + (word & record.COUNTER_MASK) - 1

    def _wait(self, place: _Place, words: list[int], members: Iterable[int] = (0,)) -> Iterator[Blocked]:
        """Wait for a member of each word's grid; a plain word names a grid of one."""
        for counter in [self._counter(place, word) + member for word in words for member in members]:
            while not self._counters.met(counter):
                value = int(self._counters.values[counter])
                yield Blocked(place, counter, value, self._counters.expected(counter))

    def _timed(self, place: _Place, work: Callable[[], bool | None]) -> bool:
        begin = time.perf_counter_ns()
        result = work()
        self._intervals.append((begin, time.perf_counter_ns(), place.row, place.worker, place.layer))
        return bool(result)
