"""From dependencies to counters: the wait and signal words of every task.

A counter stands for "these groups of tasks are done": its total is their arrivals. Groups with the same
successors share one, so a task signals few counters and most consumers wait for one. Counters that the step
table picks form grids: [row block][head group] for what attention items wait for, [row block] for what they
complete and for what final rows wait for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import Index
from ..isa.record import INDEXED, NEXT, SIGNALS, WAITS, counter_word, word_counter
from .derive import BODY, EPILOGUE, PROLOGUE, Dependencies, relation
from .lower import Tasks
from .regions import block_rows

Words = NDArray[np.int32]
Totals = NDArray[np.int32]


@dataclass(frozen=True)
class Join:
    """A `join` instruction that runs before `tasks` of a phase, where these have more waits than a record holds."""

    segment: int
    phase: int
    tasks: NDArray[np.int64]
    waits: tuple[int, ...]  # words
    signal: int  # word


@dataclass(frozen=True)
class Sync:
    """Words of each phase of each segment, [n, 8], and the totals of a counter block (see Program)."""

    waits: list[list[Words]]
    signals: list[list[Words]]
    joins: list[Join]
    totals_first: Totals
    totals_middle: Totals
    totals_last: Totals


def synchronise(tasks: Tasks, dependencies: Dependencies) -> Sync:
    build = _Builder(tasks, dependencies)
    build.attention_grids()
    build.final_row_grid()
    build.groups_done()
    build.prologue_done()
    build.wait_for_groups()
    return build.sync()


class _Builder:
    def __init__(self, tasks: Tasks, dependencies: Dependencies) -> None:
        self.tasks = tasks
        self.groups = dependencies.groups
        self.counters = 0
        self.waits = [[np.zeros((len(p), WAITS), np.int32) for p in s] for s in tasks.segments]
        self.signals = [[np.zeros((len(p), SIGNALS), np.int32) for p in s] for s in tasks.segments]
        self.joins: list[Join] = []
        self.arrivals_by_table: dict[int, int] = {}
        self.waited: dict[int, set[int]] = defaultdict(set)  # consumer group -> counters
        self.from_last_run: dict[int, list[int]] = defaultdict(list)  # the part of `waited` that a body may feed
        self.entering = _successors(dependencies.entering)
        self.onward = _successors(dependencies.onward)
        by_item = {g for g, group in enumerate(self.groups) if group.index is Index.ITEM}
        if by_item & ({c for _, c in dependencies.onward} | {c for _, c in dependencies.entering}):
            raise AssertionError("attention items wait for counters of their own layer only")
        self.to_items = {e for e in dependencies.within if e[1] in by_item}
        self.within = _successors(dependencies.within - self.to_items)
        # Which groups share a counter of the next block: same successors there.
        self.onward_counter: dict[frozenset[int], int] = {}

    def attention_grids(self) -> None:
        """Number both grids, signal the first from what items read; the second is signalled by the items."""
        items = [g for g, group in enumerate(self.groups) if group.index is Index.ITEM]
        if not items:
            return
        dims, first = self.tasks.dims, self.groups[items[0]]
        head_groups = len(first.members)
        ready = self._new(len(items) * head_groups)
        done = self._new(len(items))
        self.waits[first.segment][first.phase][:, 0] = counter_word(ready, indexed=True)
        self.signals[first.segment][first.phase][:, 0] = counter_word(done, indexed=True)
        for producer, consumer in sorted(self.to_items):
            group, block = self.groups[producer], self.groups[consumer].block
            touched = relation(group, self.groups[consumer])
            for head_group in range(head_groups):
                tasks = group.members[touched[:, head_group]]
                word = counter_word(ready + block * head_groups + head_group)
                _append(self.signals[group.segment][group.phase], tasks, word)
        for g in items:
            block = self.groups[g].block
            low, high = block_rows(dims, block)
            self.arrivals_by_table[done + block] = (high - low) * dims.kv_heads
            for consumer in self.within.pop(g, frozenset()):
                self.waited[consumer].add(done + block)

    def final_row_grid(self) -> None:
        """Number the counters that final rows pick from before all others of their kind, in row-block order."""
        rows = [g for g, group in enumerate(self.groups) if group.index is Index.LOGIT_ROW]
        if not rows:
            return
        base = self.counters
        for g in rows:
            picked = {successors for successors in self.onward.values() if g in successors}
            if len(picked) != 1:
                raise AssertionError("a final row must wait for exactly one counter of the last layer")
            self.onward_counter[picked.pop()] = self._new()
        phase = self.groups[rows[0]]
        self.waits[phase.segment][phase.phase][:, 0] = counter_word(base, indexed=True)

    def groups_done(self) -> None:
        """Signals of each group, and which counters its successors wait for."""
        own: dict[tuple[int, frozenset[int]], int] = {}
        for producer, group in enumerate(self.groups):
            words = self.signals[group.segment][group.phase]
            if successors := self.within.get(producer):
                key = (group.segment, successors)
                counter = own[key] if key in own else own.setdefault(key, self._new())
                _append(words, group.members, counter_word(counter))
                for consumer in successors:
                    self.waited[consumer].add(counter)
            if successors := self.onward.get(producer):
                if successors not in self.onward_counter:
                    self.onward_counter[successors] = self._new()
                counter = self.onward_counter[successors]
                _append(words, group.members, counter_word(counter, next_layer=True))
        for successors, counter in self.onward_counter.items():
            for consumer in successors:
                self.waited[consumer].add(counter)
                self.from_last_run[consumer].append(counter)

    def prologue_done(self) -> None:
        """The prologue arrives at block 0 where a layer before would; the total of block 0 is its own."""
        fresh: dict[frozenset[int], int] = {}
        for producer, successors in self.entering.items():
            group = self.groups[producer]
            counters = {min(self.from_last_run[c]) for c in successors if self.from_last_run[c]}
            # What no earlier run feeds waits, in every layer, for tasks that one does: the prologue signals those.
            fed = {b for c in successors if not self.from_last_run[c] for b in self._fed_before(c)}
            counters |= {min(self.from_last_run[b]) for b in fed}
            if alone := frozenset(c for c in successors if not self.from_last_run[c] and not self._fed_before(c)):
                counter = fresh[alone] if alone in fresh else fresh.setdefault(alone, self._new())
                counters.add(counter)
                for consumer in alone:
                    self.waited[consumer].add(counter)
            for counter in sorted(counters):
                _append(self.signals[group.segment][group.phase], group.members, counter_word(counter))

    def _fed_before(self, consumer: int) -> list[int]:
        """The nearest tasks before `consumer` in its own run that an earlier run signals."""
        near = [p for p, successors in self.within.items() if consumer in successors]
        return [p for p in near if self.from_last_run[p]][:1] or [b for p in near for b in self._fed_before(p)][:1]

    def wait_for_groups(self) -> None:
        """Waits of each group; through joins where they are more than its records have room for."""
        for consumer in sorted(self.waited):
            group = self.groups[consumer]
            if group.virtual:
                continue
            words = self.waits[group.segment][group.phase]
            room = WAITS - int(np.count_nonzero(words[group.members[0]]))
            wanted = [counter_word(counter) for counter in sorted(self.waited[consumer])]
            while len(wanted) > room:
                head, wanted = wanted[:WAITS], wanted[WAITS:]
                joined = counter_word(self._new())
                self.joins.append(Join(group.segment, group.phase, group.members, tuple(head), joined))
                wanted.append(joined)
            for word in wanted:
                _append(words, group.members, word)

    def sync(self) -> Sync:
        prologue, _ = self._arrivals(PROLOGUE)
        body, onward = self._arrivals(BODY)
        epilogue, _ = self._arrivals(EPILOGUE)
        for counter, arrivals in self.arrivals_by_table.items():
            body[counter] += arrivals
        return Sync(self.waits, self.signals, self.joins, prologue + body, body + onward, onward + epilogue)

    def _new(self, count: int = 1) -> int:
        self.counters += count
        return self.counters - count

    def _arrivals(self, segment: int) -> tuple[Totals, Totals]:
        """Arrivals per counter at the segment's own block and at the next one."""
        words = np.concatenate(
            [w.ravel() for w in self.signals[segment]]
            + [np.array([j.signal], np.int32) for j in self.joins if j.segment == segment]
        )
        words = words[(words != 0) & (words & INDEXED == 0)]
        out = []
        for part in (words[words & NEXT == 0], words[words & NEXT != 0]):
            out.append(np.bincount(word_counter(part), minlength=self.counters).astype(np.int32))
        return out[0], out[1]


def _successors(edges: set[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Consumers of each producer; producers in order."""
    out: dict[int, set[int]] = defaultdict(set)
    for producer, consumer in sorted(edges):
        out[producer].add(consumer)
    return {producer: frozenset(consumers) for producer, consumers in out.items()}


def _append(words: Words, tasks: NDArray[np.int64], word: int) -> None:
    """Put a word into the first free column of each task's row."""
    column = np.count_nonzero(words[tasks], axis=1)
    if column.max(initial=-1) >= words.shape[1]:
        raise AssertionError(f"a task has more than {words.shape[1]} words of a kind")
    words[tasks, column] = word
