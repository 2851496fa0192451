"""Runs a launch in one thread. A worker's stream advances when the counters it waits for have reached their totals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import trace as tracing
from ...errors import MegakernelError
from ...isa import Operation, Phase, Rows, StepTable, record, slot_work
from ...isa.context import Context
from ...isa.operations.attention import attend
from ...program import Program
from ...trace import Trace, TraceHeader


class Counters:
    """The values of all counters, [ranks, counters per rank]. Each launch adds the same total to a counter, and
    counters are not reset between launches. A wait in launch k (counted from 1) therefore ends when the counter is at
    least k times its total. The comparison works modulo 2^32, because counters overflow."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.totals = program.totals().swapaxes(0, 1).reshape(program.ranks, -1).astype(np.int64)
        self.reset()

    def reset(self) -> None:
        self.values = np.zeros_like(self.totals)
        self.launch = 0

    def expected(self, rank: int, counter: int) -> int:
        return self.launch * int(self.totals[rank, counter])

    def met(self, rank: int, counter: int) -> bool:
        return (int(self.values[rank, counter]) - self.expected(rank, counter)) % 2**32 < 2**31

    def check_totals(self) -> None:
        """Raise MegakernelError unless each launch so far has added exactly the total to every counter."""
        wrong = np.argwhere(self.values != self.launch * self.totals)
        if len(wrong):
            rank, n = wrong[0]
            total = int(self.totals[rank, n])
            got = int(self.values[rank, n]) - (self.launch - 1) * total
            raise MegakernelError(
                f"program {self.program.hash} is wrong: in a launch, its signals added {got} to counter {n} of rank "
                f"{rank}, not the total of {total}"
            )


@dataclass(frozen=True)
class StreamPlace:
    """An instruction as it runs in one layer. `block` is the number of this layer's block of counters."""

    rank: int
    worker: int
    layer: int  # number of the layer, or PROLOGUE or EPILOGUE, as in a trace
    block: int
    row: int
    words: NDArray[np.int32]
    phase: Phase

    def operand(self, name: str) -> int:
        return int(self.words[record.OPERAND_WORD + self.phase.operands.index(name)])

    def waits(self, *, indexed: bool) -> list[int]:
        return _chosen(record.waits(self.words), indexed)

    def signals(self, *, indexed: bool) -> list[int]:
        return _chosen(record.signals(self.words), indexed)

    def __str__(self) -> str:
        names = {tracing.PROLOGUE: "the prologue", tracing.EPILOGUE: "the epilogue"}
        where = names.get(self.layer, f"layer {self.layer}")
        return f"worker {self.worker} of rank {self.rank} at {self.phase.name} (record {self.row} of {where})"


def _chosen(words: NDArray[np.int32], indexed: bool) -> list[int]:
    return [int(w) for w in words if w and bool(w & record.INDEXED) == indexed]


def _stream(program: Program, rank: int, worker: int) -> Iterator[StreamPlace]:
    layers = program.dims.model.layers
    runs = [(program.prologue, tracing.PROLOGUE, 0)]
    runs += [(program.body, layer, layer) for layer in range(layers)]
    runs += [(program.epilogue, tracing.EPILOGUE, layers)]
    index = rank * program.workers + worker
    for segment, layer, block in runs:
        for i, words in enumerate(segment.stream(index)):
            row, phase = int(segment.offsets[index]) + i, program.forward.of_record(words)
            yield StreamPlace(rank, worker, layer, block, row, words, phase)


@dataclass(frozen=True)
class Blocked:
    """Yielded by a stream that cannot continue. It says which instruction waits for which counter."""

    place: StreamPlace
    counter: int
    value: int
    expected: int

    def __str__(self) -> str:
        return f"{self.place} waits for counter {self.counter}: {self.value} of {self.expected}"


class ReferenceLaunch:
    """Runs one step of `program`. `context(phase, table, layer)` returns the data that an instruction of a phase can
    access, and `execute` does an instruction's work (see ReferenceBackend.execute)."""

    def __init__(
        self,
        program: Program,
        table: StepTable,
        counters: Counters,
        context: Callable[[Phase, StepTable, int], Context],
        execute: Callable[..., None],
    ) -> None:
        self._program, self._counters = program, counters
        self._tables = [table.rank(rank) for rank in range(program.ranks)]
        self._execute, self._context = execute, context
        self._claimed = np.zeros((len(program.queues.offsets) - 1, program.dims.model.layers), np.int64)
        self._intervals: list[tuple[int, ...]] = []

    def run(self, order: np.random.Generator | None) -> None:
        """Run all streams to their ends. Workers take turns in random order, or in a fixed order if `order` is None.
        Raises MegakernelError if all are blocked."""
        ranks, per_rank = range(self._program.ranks), range(self._program.workers)
        workers = [self._worker(rank, worker) for rank in ranks for worker in per_rank]
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
        """The trace, with one COMPUTE interval for each attention item and for each other instruction except drains."""
        columns = np.array(self._intervals, np.int64).reshape(-1, 6).T
        intervals = np.zeros(len(self._intervals), tracing.DTYPE)
        for name, column in zip(("begin", "end", "instruction", "rank", "worker", "layer"), columns, strict=True):
            intervals[name] = column
        intervals["launch"] = 1
        intervals["kind"] = tracing.IntervalKind.COMPUTE
        intervals.sort(order=("rank", "worker", "begin"))
        header = TraceHeader(self._program.hash, "reference", 1e-9, 0.0, 0.0, 0)
        return Trace(header, intervals, slot_work(self._tables[0])[None])

    def _worker(self, rank: int, worker: int) -> Iterator[Blocked | None]:
        """Run a worker's stream. Yields None after each unit of work, and a Blocked each time it cannot continue."""
        for place in _stream(self._program, rank, worker):
            yield from self._run(place)

    def _run(self, place: StreamPlace) -> Iterator[Blocked | None]:
        """Execute one instruction: its waits, its work and its signals."""
        table = self._tables[place.rank]
        layer = min(place.block, self._program.dims.model.layers - 1)
        yield from self._wait(place, place.waits(indexed=False))
        if place.phase.operation is Operation.ATTENTION:
            slot = place.operand("slot")
            for item in range(*table.slot_items[slot : slot + 2]):
                yield from self._wait(place, place.waits(indexed=True), self._item_members(place, item))
                if self._attend(place, layer, item):
                    self._signal_rows(place, item)
                yield None
        elif place.phase.operation is Operation.DRAIN:
            yield from self._drain(place)
        else:
            yield from self._wait(place, place.waits(indexed=True), self._logit_row_members(place))
            self._timed(place, partial(self._execute, place.words, layer, table, self._program.forward, place.rank))
        for word in place.signals(indexed=False):
            self._signal(place, word)
        yield None

    def _attend(self, place: StreamPlace, layer: int, item: int) -> bool:
        """Run an attention item. Return whether the attention output of its rows is complete now."""
        return self._timed(place, partial(attend, self._context(place.phase, self._tables[place.rank], layer), item))

    def _drain(self, place: StreamPlace) -> Iterator[Blocked | None]:
        """Claim a queue's instructions and run them, until its first `end` (an operand) are claimed in this layer."""
        while self._left(place):
            yield from self._run(self._claim(place))

    def _left(self, drain: StreamPlace) -> bool:
        return bool(self._claimed[self._queue(drain), drain.block] < drain.operand("end"))

    def _claim(self, drain: StreamPlace) -> StreamPlace:
        queues, queue = self._program.queues, self._queue(drain)
        row = int(queues.offsets[queue] + self._claimed[queue, drain.block])
        self._claimed[queue, drain.block] += 1
        words, number = queues.records[row], len(self._program.body.records) + row
        return replace(drain, row=number, words=words, phase=self._program.forward.of_record(words))

    def _queue(self, drain: StreamPlace) -> int:
        return drain.rank * self._program.rank_queues + drain.operand("queue")

    def _item_members(self, place: StreamPlace, item: int) -> list[int]:
        """Return which counters an attention item waits for, as offsets in the grid [row block][group of KV heads]."""
        t = self._tables[place.rank]
        first = int(t.item_kv_head[item])
        last = first + int(t.item_kv_heads[item]) - 1
        groups = range(first // place.operand("group_heads"), last // place.operand("group_heads") + 1)
        blocks = range(t.item_wait_block[item], t.item_wait_block[item] + t.item_wait_blocks[item])
        return [block * place.operand("groups") + group for block in blocks for group in groups]

    def _logit_row_members(self, place: StreamPlace) -> list[int]:
        """Return the row blocks with the logit rows that a norm instruction reads; [] for other instructions."""
        if place.phase.operation is not Operation.NORM or place.phase.rows is not Rows.LOGIT:
            return []
        t, row = self._tables[place.rank], place.operand("row")
        rows = t.logit_rows[row : row + place.operand("rows")].tolist()
        return [r // t.dims.bucket.row_block for r in rows if r >= 0 and place.rank in t.dims.owners(r)]

    def _signal_rows(self, place: StreamPlace, item: int) -> None:
        t = self._tables[place.rank]
        row, arrivals = int(t.item_row[item]), int(t.item_rows[item] * t.item_kv_heads[item])
        for word in place.signals(indexed=True):
            self._signal(place, word, row, arrivals)

    def _signal(self, place: StreamPlace, word: int, row: int = 0, arrivals: int = 1) -> None:
        """Send a signal: add `arrivals` to a counter. `word` names the counter and the ranks on which it is increased.
        If the word names one counter per row block (group of token rows), `row` is a token row of the block."""
        dims = self._tables[place.rank].dims
        rank = word >> record.RANK_SHIFT & record.RANK_MASK
        ranks = {record.ALL_RANKS: range(dims.split.tp), record.OWNER: dims.owners(row)}.get(rank, (rank,))
        self._counters.values[list(ranks), self._counter(place, word) + row // dims.bucket.row_block] += arrivals

    def _counter(self, place: StreamPlace, word: int) -> int:
        block = place.block + bool(word & record.NEXT)
        return block * self._program.counters + (word & record.COUNTER_MASK) - 1

    def _wait(self, place: StreamPlace, words: list[int], members: Iterable[int] = (0,)) -> Iterator[Blocked]:
        """For each word, wait until counters reach their totals: those at offsets `members` from the word's counter."""
        for counter in [self._counter(place, word) + member for word in words for member in members]:
            while not self._counters.met(place.rank, counter):
                value = int(self._counters.values[place.rank, counter])
                yield Blocked(place, counter, value, self._counters.expected(place.rank, counter))

    def _timed(self, place: StreamPlace, work: Callable[[], bool | None]) -> bool:
        begin = time.perf_counter_ns()
        result = work()
        end = time.perf_counter_ns()
        self._intervals.append((begin, end, place.row, place.rank, place.worker, place.layer))
        return bool(result)
