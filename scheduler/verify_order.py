"""Second stage of the verifier: events, what each waits for, and what is therefore known to have happened.

An event is one run of an instruction, or one of two kinds of virtual event that stand for what the step table
decides:

item    (layer, row block, KV-head group): every attention work item of these rows and heads, whichever slot has
        it. It is known to come after the counters that its indexed wait names and after nothing else; its
        arrival at the row block's counter proves only itself. A split's last arriver stands for the whole split.
read    (final_norm's grid, row block): the read of one logit row, after that row block's counter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import BY_NAME
from ..isa import record as bits
from ..program import Program
from .verify_form import Ints, Part


@dataclass(frozen=True)
class Grid:
    """Virtual events of a segment: `event` of [rank, row block, group] and the row blocks' sizes."""

    event: Ints
    group_heads: int


class Events:
    """Events of one segment: its records, then virtual ones. Counters are flat: rank * counters + counter.

    `waits` and `may_wait` are (counter, event) pairs; `signals` are (event, counter, next block, arrivals);
    `after` are (event, event) pairs. `may_wait` and `after` hold for some step tables only: they count against
    freedom from deadlock and prove nothing about data.
    """

    def __init__(self, part: Part) -> None:
        program, n = part.program, len(part.records)
        self.part, self.count = part, n
        self.clock: Ints = part.stream.astype(np.int64)  # component of the vector clock; -1: none
        self.items: Grid | None = None
        self.reads: list[tuple[Ints, int, Ints]] = []  # (records, rank, event of [row block])
        waits, signals = part.waits, part.signals
        fixed = ~waits.indexed
        base = part.rank[waits.row] * program.counters + waits.counter
        self.waits = [(base[fixed], waits.row[fixed])]
        self.may_wait: list[tuple[Ints, Ints]] = []
        self.after: list[tuple[Ints, Ints]] = []
        self.signals: list[tuple[Ints, Ints, NDArray[np.bool_], Ints]] = []
        for rank in range(program.ranks):
            here = ~signals.indexed & ((signals.rank == rank) | (signals.rank == bits.ALL_RANKS))
            row, counter = signals.row[here], signals.counter[here] + rank * program.counters
            self.signals.append((row, counter, signals.next[here], np.ones(len(row), dtype=np.int64)))
        if part.name == "body":
            self._add_items(base)
        elif part.name == "epilogue":
            self._add_reads(base)

    def _new(self, shape: tuple[int, ...]) -> Ints:
        first = self.count
        self.count += int(np.prod(shape))
        self.clock = np.concatenate([self.clock, np.full(self.count - first, -1)])
        return np.arange(first, self.count).reshape(shape)

    def _add_items(self, base: Ints) -> None:
        part, program, dims = self.part, self.part.program, self.part.program.dims
        instruction = BY_NAME["attention"]
        rows = part.rows(instruction)
        columns = instruction.columns(part.records[rows])
        groups, group_heads = int(columns["groups"][0]), int(columns["group_heads"][0])
        event = self._new((program.ranks, dims.row_blocks, groups))
        self.clock[event.ravel()] = program.ranks * program.workers + np.arange(event.size)
        self.items = Grid(event, group_heads)
        block_rows = np.minimum(dims.tokens - np.arange(dims.row_blocks) * dims.row_block, dims.row_block)
        heads = np.minimum(dims.kv_heads - np.arange(groups) * group_heads, group_heads)
        arrivals = block_rows[:, None] * heads
        waits, signals = part.waits, part.signals
        for rank in range(program.ranks):
            mine, items = rows[part.rank[rows] == rank], event[rank].ravel()
            first = base[waits.indexed & (waits.row == mine[0])]
            grid = first + np.arange(items.size)
            self.waits.append((grid, items))
            # Any slot may wait for any member before it is through, and be the last to arrive at any member.
            begin, end = self._new((2,))
            self.may_wait.append((grid, np.full(items.size, begin)))
            self.after.append((np.full(len(mine), begin), mine))
            self.after.append((mine, np.full(len(mine), end)))
            self.after.append((np.full(items.size, end), items))
            word = np.nonzero(signals.indexed & (signals.row == mine[0]))[0][0]
            targets = range(program.ranks) if signals.rank[word] == bits.ALL_RANKS else (signals.rank[word],)
            for target in targets:
                counter = target * program.counters + signals.counter[word] + np.arange(dims.row_blocks)
                self.signals.append(
                    (
                        items,
                        np.repeat(counter, groups),
                        np.full(items.size, signals.next[word]),
                        arrivals.ravel(),
                    )
                )

    def _add_reads(self, base: Ints) -> None:
        part, dims, waits = self.part, self.part.program.dims, self.part.waits
        for first in np.unique(base[waits.indexed]):
            rows = waits.row[waits.indexed & (base == first)]
            grid = first + np.arange(dims.row_blocks)
            event = self._new((dims.row_blocks,))
            self.waits.append((grid, event))
            self.may_wait.append((np.tile(grid, len(rows)), np.repeat(rows, len(grid))))
            self.reads.append((rows, int(part.rank[rows[0]]), event))

    def arrivals(self, next_block: bool) -> Ints:
        """Arrivals per counter that one run brings to its own or to the next block."""
        program = self.part.program
        out: Ints = np.zeros(program.ranks * program.counters, dtype=np.int64)
        for _, counter, is_next, count in self.signals:
            np.add.at(out, counter[is_next == next_block], count[is_next == next_block])
        return out

    def label(self, event: int) -> str:
        if event < len(self.part.records):
            return self.part.label(event)
        if self.items is not None:
            where = np.argwhere(self.items.event == event)
            if len(where):
                rank, block, group = where[0]
                return f"attention item of row block {block}, head group {group} [body, rank {rank}]"
            return "attention, any slot [body]"
        for rows, _, events in self.reads:
            if event in events:
                return f"{self.part.label(int(rows[0]))}, logit row in row block {event - events[0]}"
        raise IndexError(event)


class Unrolled:
    """The runs of a program, its events and counters as rows of one graph, and the vector clocks.

    Run 0 is the prologue, runs 1..layers the body, the last one the epilogue. `clocks[row, s]` is how many
    events of stream s are known to have ended when the event of that row ends; items have a stream of their own
    per row block and group, with one event per layer.
    """

    def __init__(self, program: Program, events: list[Events], layers: int) -> None:
        prologue, body, epilogue = events
        self.program, self.layers = program, layers
        self.runs = [prologue, *[body] * layers, epilogue]
        self.first = np.concatenate([[0], np.cumsum([e.count for e in self.runs])])
        self.streams = program.ranks * program.workers
        self.width = self.streams + (0 if body.items is None else body.items.event.size)
        self.block = program.ranks * program.counters
        self.rows = int(self.first[-1]) + (layers + 1) * self.block
        lengths = [np.append(e.part.lengths, np.zeros(self.width - self.streams, dtype=np.int64)) for e in self.runs]
        before = np.concatenate([np.zeros((1, self.width), dtype=np.int64), np.cumsum(lengths, axis=0)[:-1]])
        self.position = [self._positions(t, before[t]) for t in range(len(self.runs))]

    def _positions(self, run: int, before: Ints) -> Ints:
        """Per event of a run, its 1-based position in its clock component."""
        events = self.runs[run]
        out: Ints = np.full(events.count, run, dtype=np.int64)
        part = events.part
        out[: len(part.records)] = before[part.stream] + part.position + 1
        return out

    def counter_row(self, run: int, next_block: bool | NDArray[np.bool_] = False) -> Ints:
        """Row of counter 0 of the block that a run waits on or signals."""
        block = np.clip(run - 1, 0, self.layers) + np.asarray(next_block, dtype=np.int64)
        return np.asarray(self.first[-1] + block * self.block)

    def edges(self, proven: bool) -> tuple[Ints, Ints]:
        """(earlier row, later row); `proven`: those that hold for every step table, else all that may hold."""
        source, target = [], []
        stream, rows = [], []
        for t, (events, first) in enumerate(zip(self.runs, self.first[:-1], strict=True)):
            block = self.counter_row(t)
            for counter, event in events.waits + ([] if proven else events.may_wait):
                source.append(block + counter)
                target.append(first + event)
            for event, counter, is_next, _ in events.signals:
                source.append(first + event)
                target.append(self.counter_row(t, is_next) + counter)
            for earlier, later in () if proven else events.after:
                source.append(first + earlier)
                target.append(first + later)
            stream.append(events.part.stream)
            rows.append(first + np.arange(len(events.part.records)))
        all_rows, all_streams = np.concatenate(rows), np.concatenate(stream)
        order = np.argsort(all_streams, kind="stable")
        chain, chain_stream = all_rows[order], all_streams[order]
        same = chain_stream[1:] == chain_stream[:-1]
        source.append(chain[:-1][same])
        target.append(chain[1:][same])
        return np.concatenate(source), np.concatenate(target)

    def order(self) -> tuple[list[int], list[int]]:
        """A topological order of all rows under every edge that may hold, or the rows of a cycle."""
        source, target = self.edges(proven=False)
        by_source = np.argsort(source, kind="stable")
        successors = target[by_source].tolist()
        begin = np.searchsorted(source[by_source], np.arange(self.rows + 1)).tolist()
        missing = np.bincount(target, minlength=self.rows)
        ready = deque(np.nonzero(missing == 0)[0].tolist())
        left = missing.tolist()
        done: list[int] = []
        while ready:
            row = ready.popleft()
            done.append(row)
            for later in successors[begin[row] : begin[row + 1]]:
                left[later] -= 1
                if left[later] == 0:
                    ready.append(later)
        return done, [] if len(done) == self.rows else self._cycle(source, target, np.asarray(left) > 0)

    def _cycle(self, source: Ints, target: Ints, stuck: NDArray[np.bool_]) -> list[int]:
        """Every stuck row has a stuck predecessor: walk back until a row repeats."""
        inside = stuck[source] & stuck[target]
        predecessor = np.full(self.rows, -1)
        predecessor[target[inside]] = source[inside]
        path: list[int] = []
        seen: dict[int, int] = {}
        row = int(np.nonzero(stuck)[0][0])
        while row not in seen:
            seen[row] = len(path)
            path.append(row)
            row = int(predecessor[row])
        return path[seen[row] :]

    def clocks(self, order: list[int]) -> NDArray[np.int32]:
        """Vector clocks [rows, width] over the proven edges."""
        source, target = self.edges(proven=True)
        by_target = np.argsort(target, kind="stable")
        predecessors = source[by_target]
        begin = np.searchsorted(target[by_target], np.arange(self.rows + 1)).tolist()
        component = np.full(self.rows, -1)
        position = np.zeros(self.rows, dtype=np.int64)
        for t, events in enumerate(self.runs):
            here = slice(int(self.first[t]), int(self.first[t + 1]))
            component[here], position[here] = events.clock, self.position[t]
        own, value = component.tolist(), position.tolist()
        clocks: NDArray[np.int32] = np.zeros((self.rows, self.width), dtype=np.int32)
        for row in order:
            low, high = begin[row], begin[row + 1]
            if high - low == 1:
                clocks[row] = clocks[predecessors[low]]
            elif high > low:
                np.maximum.reduce(clocks[predecessors[low:high]], axis=0, out=clocks[row])
            if own[row] >= 0:
                clocks[row, own[row]] = value[row]
        return clocks

    def label(self, row: int) -> str:
        """What a violation calls a row of the graph."""
        if row >= self.first[-1]:
            block, rest = divmod(row - int(self.first[-1]), self.block)
            rank, counter = divmod(rest, self.program.counters)
            return f"counter {counter} (block {block}, rank {rank})"
        run = int(np.searchsorted(self.first, row, side="right")) - 1
        label = self.runs[run].label(row - int(self.first[run]))
        return f"layer {run - 1} {label}" if 0 < run <= self.layers else label
