"""Third stage of the verifier: the events, what each event waits for, and what has certainly happened before it.

An event is one execution of an instruction, or a virtual event. It begins when the counters that it waits for have
reached their totals, and it signals when it ends. A stream is the list of instructions of one worker. The events of a
stream begin in order and end in order, but an event may begin before the previous one ends. Virtual events stand for
work that a step's inputs, the step table, may give to any of several instructions:

item    the attention of one row block and KV-head group, in one layer and on one rank. It begins when the counters
        are complete for which attention instructions wait. When it ends, it signals the counter of its row block. This
        signal proves only that this item has ended. If instructions divide the KV blocks of a row among themselves,
        only the instruction that ends last signals, for all of them.
read    the read of one logit row in a row block, by a norm of logit rows on one rank. It follows the row block's
        counter.

A third kind serves only the proof that there is no deadlock. A `begin` means that a worker reaches a `drain`, the
instruction that runs a queue's instructions. The event of the `drain` itself is that the worker leaves it, after as
many of the queue's records as its operand named `end` says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import DRAIN, JOIN, Dims
from megakernel.isa import record as bits
from megakernel.program import Program
from megakernel.program.part import Mask, Part
from megakernel.program.phases import Ints
from megakernel.scheduler.verify.native import EventGraph, topological_order

Edges = tuple[Ints, Ints]  # earlier, later


def row_blocks(dims: Dims, rank: int) -> Ints:
    """Return the numbers of the row blocks (ranges of token rows) whose residual is stored on `rank`."""
    step = 1 if dims.split.replicated_residual else dims.split.tp
    return np.arange(rank % step, dims.bucket.row_blocks, step)


def _ended_before(key: Ints, end: Ints) -> Ints:
    """Return, for each element, the largest `end` among earlier elements with the same key, or 0 if there is none."""
    order = np.argsort(key, kind="stable")
    key, end = key[order], end[order]
    step = int(end.max()) + 1
    largest = np.maximum.accumulate(key * step + end) - key * step
    out: Ints = np.zeros_like(end)
    out[order[1:]] = np.where(key[1:] == key[:-1], largest[:-1], 0)
    return out


@dataclass(frozen=True)
class CounterGrid:
    """The attention of one rank in one layer, which waits for a grid of counters. It is divided into items, one for
    each row block (range of token rows) and each head group (`group_heads` KV heads). `event` [row block, head group]
    has the number of the virtual event that represents the item."""

    event: Ints
    group_heads: int


@dataclass(frozen=True)
class Reads:
    """The reads, on one rank, of the rows that get logits. `records` are the instructions that read the rows and wait
    for the same grid of counters. `event` has, for each row block of the rank, the number of the virtual event that
    represents the reads from it."""

    records: Ints
    rank: int
    event: Ints


class Events:
    """The events of one segment (the prologue, one layer or the epilogue). An event is one execution of an instruction.
    Virtual events, for work that only the step's inputs assign to an instruction, come last.

    waits     (counter, event) pairs. The number of a counter is rank * counters per rank + counter
    signals   (event, counter, whether the counter is that of the next layer, number of arrivals)
    may_wait  (counter, event) pairs that exist only for some inputs, or for some ways to claim queued instructions
    after     (earlier event, later event) pairs that exist only under the same conditions as `may_wait`
    chain     the events of every stream (the instructions of a worker) in program order, stream by stream
    stream    the stream of each event in `chain`

    The search for deadlocks includes `may_wait` and `after`, but they prove nothing about data."""

    def __init__(self, part: Part) -> None:
        self.part, self.count = part, len(part.records)
        self.items: dict[int, CounterGrid] = {}
        self.reads: list[Reads] = []
        self.begins: Edges = (np.zeros(0, np.int64),) * 2  # (drain, the drain's `begin` event)
        counters, waits, signals = part.program.counters, part.waits, part.signals
        self._wait = part.rank[waits.row] * counters + waits.counter
        fixed = ~waits.indexed
        self.waits: list[Edges] = [(self._wait[fixed], waits.row[fixed])]
        self.may_wait: list[Edges] = []
        self.after: list[Edges] = []
        self.signals: list[tuple[Ints, Ints, Mask, Ints]] = []
        one = ~signals.indexed & (signals.rank != bits.ALL_RANKS)
        self._signal(signals.row[one], signals.rank[one] * counters + signals.counter[one], signals.next[one], 1)
        every = ~signals.indexed & (signals.rank == bits.ALL_RANKS)
        for rank in range(part.program.ranks if every.any() else 0):
            self._signal(signals.row[every], rank * counters + signals.counter[every], signals.next[every], 1)
        self.chain, self.stream = np.arange(part.static), part.stream
        if part.name == "body":
            self._add_items()
            self._add_queues()
        elif part.name == "epilogue":
            self._add_reads()

    def _signal(self, event: Ints, counter: Ints, is_next: Mask | bool, arrivals: Ints | int) -> None:
        shape = event.shape
        self.signals.append((event, counter, np.broadcast_to(is_next, shape), np.broadcast_to(arrivals, shape)))

    def _new(self, *shape: int) -> Ints:
        first = self.count
        self.count += int(np.prod(shape))
        return np.arange(first, self.count).reshape(shape)

    def _add_items(self) -> None:
        part, program, dims = self.part, self.part.program, self.part.program.dims
        attention = part.phases.attention
        if attention is None:
            return
        every = part.rows(attention)
        blocks = np.arange(dims.bucket.row_blocks)
        row, row_end = dims.block_rows(blocks)
        for rank in range(dims.split.head_ranks):
            slots = every[part.rank[every] == rank]
            columns = attention.columns(part.records[slots[:1]])
            groups, group_heads = int(columns["groups"][0]), int(columns["group_heads"][0])
            event = self._new(dims.bucket.row_blocks, groups)
            self.items[rank] = CounterGrid(event, group_heads)
            heads = np.minimum(dims.ranks[rank].split.rank_kv_heads - np.arange(groups) * group_heads, group_heads)
            items, arrivals = event.ravel(), ((row_end - row)[:, None] * heads).ravel()
            grid = self._wait[part.waits.indexed & (part.waits.row == slots[0])] + np.arange(items.size)
            self.waits.append((grid, items))
            # The inputs of a step (the step table) may assign any item of attention to any attention instruction. So
            # assume for each item that the instruction may wait for its counter and that the item ends later than it.
            begin, end = self._new(2)
            self.may_wait.append((grid, np.full(items.size, begin)))
            self.after.append((np.full(len(slots), begin), slots))
            self.after.append((slots, np.full(len(slots), end)))
            self.after.append((np.full(items.size, end), items))
            signals = part.signals
            word = np.nonzero(signals.indexed & (signals.row == slots[0]))[0][0]
            target = signals.rank[word]
            targets = range(program.ranks) if target == bits.ALL_RANKS else [target]
            if target == bits.OWNER:
                targets = [dims.owner(row)]
            for to in targets:
                counter = to * program.counters + signals.counter[word] + blocks
                self._signal(items, np.repeat(counter, groups), signals.next[word], arrivals)

    def _add_queues(self) -> None:
        part, program = self.part, self.part.program
        drains = part.rows(DRAIN)
        if not len(drains):
            return
        columns = DRAIN.columns(part.records[drains])
        end = columns["end"].astype(np.int64)
        queue = part.rank[drains] * program.rank_queues + columns["queue"]
        begin = self._new(len(drains))
        self.begins = drains, begin
        self.chain = np.insert(self.chain, np.searchsorted(self.chain, drains), begin)
        self.stream = np.insert(self.stream, drains, part.stream[drains])
        words = part.number[part.waits.row] == DRAIN.number
        self.may_wait.append((self._wait[words], begin[np.searchsorted(drains, part.waits.row[words])]))
        self.after.append((begin, drains))

        first = part.static + program.queues.offsets[:-1].astype(np.int64)  # the first record of each queue
        records = np.arange(part.static, len(part.records))
        same = part.queue[records[1:]] == part.queue[records[:-1]]
        self.after.append((records[:-1][same], records[1:][same]))
        # A worker may claim a record of a queue while earlier instructions of the worker's stream still run. A record
        # therefore follows the `begin` events of all drains that may claim the record, but not the instructions before
        # these drains. If a stream has several drains of one queue, each drain starts where the previous drain ended.
        done = _ended_before(part.stream[drains] * program.rank_queues + queue, end)
        busy = done < end
        self.after.append((begin[busy], (first[queue] + done)[busy]))
        self.after.append(((first[queue] + end - 1)[busy], drains[busy]))

    def _add_reads(self) -> None:
        part, waits = self.part, self.part.waits
        for first in np.unique(self._wait[waits.indexed]):
            rows = waits.row[waits.indexed & (self._wait == first)]
            rank = int(part.rank[rows[0]])
            blocks = row_blocks(part.program.dims, rank)
            grid, event = first + blocks, self._new(len(blocks))
            self.waits.append((grid, event))
            self.may_wait.append((np.tile(grid, len(rows)), np.repeat(rows, len(grid))))
            self.reads.append(Reads(rows, rank, event))

    def arrivals(self, next_block: bool) -> Ints:
        """Return how many arrivals one execution of the segment adds to each counter. Only counters of the next layer
        count if `next_block` is true, otherwise only those of the segment's own layer."""
        program = self.part.program
        out: Ints = np.zeros(program.ranks * program.counters, dtype=np.int64)
        for _, counter, is_next, count in self.signals:
            mine = is_next == next_block
            out += np.bincount(counter[mine], weights=count[mine], minlength=len(out)).astype(np.int64)
        return out

    def label(self, event: int) -> str:
        if event < len(self.part.records):
            return self.part.label(event)
        for rank, grid in self.items.items():
            where = np.argwhere(grid.event == event)
            if len(where):
                return f"attention item of row block {where[0, 0]}, head group {where[0, 1]} [body, rank {rank}]"
        for reads in self.reads:
            if event in reads.event:
                block = row_blocks(self.part.program.dims, reads.rank)[event - reads.event[0]]
                return f"{self.part.label(int(reads.records[0]))}, logit row in row block {block}"
        drains, begins = self.begins
        if event in begins:
            return f"{self.part.label(int(drains[np.searchsorted(begins, event)]))} begins"
        return "attention, any slot [body]"


class Unrolled:
    """A program with all its layers as one graph. Its nodes, called rows, are events (executions of instructions) and
    counters. Run 0 is the prologue, runs 1..layers are the layers, and the last run is the epilogue."""

    def __init__(self, program: Program, events: list[Events], layers: int) -> None:
        prologue, body, epilogue = events
        self.program, self.layers = program, layers
        self.runs = [prologue, *[body] * layers, epilogue]
        self.first = np.cumsum([0] + [e.count for e in self.runs]).astype(np.int32)
        self.block = program.ranks * program.counters
        self.rows = int(self.first[-1]) + (layers + 1) * self.block
        runs = list(zip(self.runs, self.first[:-1].astype(np.int64), strict=True))
        self._chain = np.concatenate([first + e.chain for e, first in runs])
        stream = np.concatenate([e.stream for e, _ in runs])
        order = np.argsort(stream, kind="stable")
        self._chain, self._stream = self._chain[order], stream[order]
        same = self._stream[1:] == self._stream[:-1]
        proven: list[Edges] = [(self._chain[:-1][same], self._chain[1:][same])]
        perhaps: list[Edges] = []
        for t, (e, first) in enumerate(runs):
            block = int(self.first[-1]) + min(max(t - 1, 0), layers) * self.block
            proven += [(block + counter, first + event) for counter, event in e.waits]
            proven += [
                (first + event, block + is_next * self.block + counter) for event, counter, is_next, _ in e.signals
            ]
            perhaps += [(block + counter, first + event) for counter, event in e.may_wait]
            perhaps += [(first + earlier, first + later) for earlier, later in e.after]
        self.graph = self._graph(proven)
        self._any_order = self._graph(proven + perhaps)

    def _graph(self, edges: list[Edges]) -> EventGraph:
        source, target = (np.concatenate(side).astype(np.int32) for side in zip(*edges, strict=True))
        return EventGraph(self.rows, self.first, source, target)

    def order(self) -> tuple[NDArray[np.int32], list[int]]:
        """Return the nodes in a topological order of all edges that a run may have. Also return the nodes of a cycle,
        or an empty list if there is none."""
        graph = self._any_order
        missing = np.bincount(graph.target, minlength=self.rows).astype(np.int32)
        order, left = topological_order(graph, missing)
        return order, [] if len(order) == self.rows else self._cycle(left > 0)

    def _cycle(self, stuck: Mask) -> list[int]:
        """Return a cycle of the graph. `stuck` marks the nodes on or behind a cycle. Each of these has a predecessor
        that is also stuck. So walking back from predecessor to predecessor must come to a node for the second time."""
        graph = self._any_order
        inside = stuck[graph.source] & stuck[graph.target]
        predecessor = np.full(self.rows, -1)
        predecessor[graph.target[inside]] = graph.source[inside]
        path: list[int] = []
        seen: dict[int, int] = {}
        row = int(np.nonzero(stuck)[0][0])
        while row not in seen:
            seen[row] = len(path)
            path.append(row)
            row = int(predecessor[row])
        return path[seen[row] :]

    def ends(self) -> Edges:
        """Return two arrays with one node per stream (the instructions of a worker). The first has the last node that
        does work or is waited for, and the second has the last node of all. They differ if a stream ends with a `join`
        that signals nothing. Such a join only waits, so it may end at any time, and the condition that it waited for
        stays true."""
        last = np.nonzero(np.append(self._stream[1:] != self._stream[:-1], True))[0]
        lasts = self._chain[last]
        run = np.searchsorted(self.first, lasts, side="right") - 1
        work = last.copy()
        for t in np.unique(run):
            here, part = run == t, self.runs[t].part
            event = lasts[here] - self.first[t]
            idle = (part.number[event] == JOIN.number) & ~np.isin(event, part.signals.row)
            work[here] -= idle
        alone = work >= 0
        alone[1:] &= work[1:] > last[:-1]  # leave out a stream of one join, which does no work
        return self._chain[work[alone]], lasts

    def label(self, row: int) -> str:
        """Return the name of a node of the graph, as an error message shows it."""
        if row >= self.first[-1]:
            block, rest = divmod(row - int(self.first[-1]), self.block)
            rank, counter = divmod(rest, self.program.counters)
            return f"counter {counter} (block {block}, rank {rank})"
        run = int(np.searchsorted(self.first, row, side="right")) - 1
        label = self.runs[run].label(row - int(self.first[run]))
        return f"layer {run - 1} {label}" if 0 < run <= self.layers else label
