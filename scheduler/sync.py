"""Turns dependencies between groups of tasks into counters, the integers in device memory by which instructions wait
for each other. An encoded instruction names them in its wait words and signal words.

A counter means "these groups of tasks are done". Its total is the number of arrivals that its signals add. Groups with
the same successors share a counter, so a task signals few counters and most consumers wait for one counter.

Attention and the norm of logit rows read rows that the step's inputs (the step table) select. So the step table also
selects the counters to wait for. These counters form three grids: [row block][KV-head group] for the inputs of
attention, [row block] for its outputs, and [row block] for the final rows, which are the residual rows after the last
layer."""

from __future__ import annotations

from collections import Counter as Counting
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Index
from megakernel.isa import record as rec
from megakernel.scheduler.derive import BODY, EPILOGUE, PROLOGUE, Dependencies
from megakernel.scheduler.regions import block_rows, head_groups
from megakernel.scheduler.tasks import PhaseTasks, Tasks

Words = NDArray[np.int32]
Totals = NDArray[np.int32]  # [ranks, counters]

# Counters are first numbered in the order in which they are created. At the end, `synchronise` gives each counter its
# final number. This depends on the counter's home: the only rank that uses the counter, or SHARED.
SHARED = -1  # home of a counter that is signalled on all ranks at once, and so has the same number on each


@dataclass(frozen=True, order=True)
class Counter:
    """The target of a signal: a counter, and the rank whose copy of the counter gets the signal (or ALL_RANKS)."""

    number: int
    rank: int

    def signal(self, *, next_layer: bool = False) -> int:
        return rec.counter_word(self.number, rank=self.rank, next_layer=next_layer)


@dataclass(frozen=True)
class Join:
    """A `join`, an instruction that only waits for counters and then signals one. Tasks that need more counters than a
    record can name wait for the join instead. `tasks` is the index of their PhaseTasks in the segment, and `members`
    are their indices in it.
    """

    segment: int
    tasks: int
    members: NDArray[np.int64]
    waits: Words  # [waits]
    signal: Words  # [1]


@dataclass(frozen=True)
class Sync:
    """The counters of a program. `waits` and `signals` have, for each segment and phase, an array of words [tasks, 8];
    each word names a counter. `barrier` has the two counters of the barrier at the end of a launch on several ranks.
    The totals say how many arrivals each counter gets in the first layer, in a middle layer and in the epilogue."""

    waits: list[list[Words]]
    signals: list[list[Words]]
    joins: list[Join]
    barrier: tuple[int, int] | None
    totals_first: Totals
    totals_middle: Totals
    totals_last: Totals


def synchronise(tasks: Tasks, dependencies: Dependencies, *, overlap_ranks: bool = True) -> Sync:
    """Return the counters by which tasks wait for each other. If `overlap_ranks` is true, a task waits for those row
    blocks of other ranks' data that it reads, otherwise until the other ranks have finished the whole phase."""
    build = _Builder(tasks, dependencies, overlap_ranks)
    # The inputs of a step select a counter of a grid by its index, so a grid's counters need consecutive numbers.
    build.attention_grids()
    build.final_row_grid()
    onward = build.groups_done()
    build.prologue_done(onward)
    build.wait_for_groups()
    return build.sync()


class _Builder:
    def __init__(self, tasks: Tasks, dependencies: Dependencies, overlap_ranks: bool) -> None:
        self.tasks = tasks
        self.groups = dependencies.groups
        self.homes: list[int] = []  # for each counter, its home: a rank, or SHARED
        self.waits = [[np.zeros((len(p), rec.WAITS), np.int32) for p in s] for s in tasks.segments]
        self.signals = [[np.zeros((len(p), rec.SIGNALS), np.int32) for p in s] for s in tasks.segments]
        self.joins: list[Join] = []
        self.arrivals_by_table: dict[Counter, int] = {}
        self.waited: dict[int, set[int]] = defaultdict(set)  # consumer group -> the counters that it waits for
        self.entering = _successors(dependencies.entering)
        self.producers: dict[int, list[int]] = defaultdict(list)
        for producer, consumer in sorted(dependencies.within):
            self.producers[consumer].append(producer)
        by_item = {g for g, group in enumerate(self.groups) if group.index is Index.ITEM}
        if by_item & ({c for _, c in dependencies.onward} | {c for _, c in dependencies.entering}):
            raise AssertionError("attention items may only wait for counters of their own layer")
        self.to_items = {e for e in dependencies.within if e[1] in by_item}
        self.siblings: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.by_blocks = overlap_ranks
        for g in range(len(self.groups)):
            self.siblings[self._kind(g)].append(g)
        self.within = {p: self._targets(p, s) for p, s in _successors(dependencies.within - self.to_items).items()}
        self.onward = {p: self._targets(p, s) for p, s in _successors(dependencies.onward).items()}
        # Groups of tasks with the same successors share a counter: (run, rank, successors) -> this counter.
        self.shared: dict[tuple[str, int, frozenset[int]], Counter] = {}

    def _kind(self, g: int) -> tuple[int, ...]:
        """Return the key that a group of tasks shares with its siblings, the same tasks on other ranks: the phase and,
        with `self.by_blocks`, the row block. Siblings that exchange data with several ranks share one counter."""
        group = self.groups[g]
        phase = (group.segment, group.ordinal, int(group.virtual))
        return (*phase, group.block) if self.by_blocks else phase

    def _targets(self, producer: int, successors: Iterable[int]) -> list[tuple[int, frozenset[int]]]:
        """Return which ranks the group `producer` must signal, as pairs (rank, successors on this rank).

        Siblings are the same tasks on different ranks. If successors on several ranks are siblings, one pair stands for
        them: (ALL_RANKS, all siblings). Without `self.by_blocks`, a task waits until a phase has ended on all ranks. A
        group then signals ALL_RANKS even if its only successor is on another rank."""
        by_kind: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for g in successors:
            by_kind[self._kind(g)].append(g)
        out: dict[int, set[int]] = defaultdict(set)
        for kind, members in by_kind.items():
            ranks = {self.groups[g].rank for g in members}
            if len(ranks) > 1 or not (self.by_blocks or self.groups[producer].rank in ranks):
                out[rec.ALL_RANKS].update(self.siblings[kind])
            else:
                out[ranks.pop()].update(members)
        return [(rank, frozenset(groups)) for rank, groups in sorted(out.items())]

    def attention_grids(self) -> None:
        """Create the two grids of counters for attention. The tasks that compute q, k and v signal the first grid,
        which is on the rank that runs the attention. Attention signals the second grid, which is on the rank that
        receives the attention output of the rows."""
        items = [g for g, group in enumerate(self.groups) if group.index is Index.ITEM]
        if not items:
            return
        dims = self.tasks.dims
        done = self._new(SHARED, dims.bucket.row_blocks)
        # rank -> (the first counter of the grid for the items' inputs on this rank, the number of KV-head groups)
        ready: dict[int, tuple[int, int]] = {}
        for g in items:
            group = self.groups[g]
            if group.rank in ready:
                continue
            groups = int(self._tasks(g).columns["groups"][0])
            ready[group.rank] = self._new(group.rank, dims.bucket.row_blocks * groups), groups
            waits, signals = (words[group.segment][group.tasks] for words in (self.waits, self.signals))
            waits[:, 0] = rec.counter_word(ready[group.rank][0], indexed=True)
            signals[:, 0] = rec.counter_word(done, rank=self._output_rank(group.rank), indexed=True)
        # index of a PhaseTasks -> which of its tasks compute inputs of which KV-head group: [tasks, head groups]
        feeds: dict[int, NDArray[np.bool_]] = {}
        for producer, consumer in sorted(self.to_items):
            group, item = self.groups[producer], self.groups[consumer]
            first, groups = ready[item.rank]
            if group.tasks not in feeds:
                attention = self._tasks(consumer)
                size = int(attention.columns["group_heads"][0])
                made = self._tasks(producer)
                rank_dims = self.tasks.rank_dims[item.rank]
                feeds[group.tasks] = head_groups(made.phase, made.columns, attention.phase, rank_dims, size)
            touched = feeds[group.tasks][group.members]
            if group.rank != item.rank or not touched.any(axis=1).all():
                raise AssertionError(
                    "attention items may only wait for tasks of their own rank that write their inputs"
                )
            for head_group in range(groups):
                counter = Counter(first + item.block * groups + head_group, item.rank)
                _append(
                    self.signals[group.segment][group.tasks], group.members[touched[:, head_group]], counter.signal()
                )
        self._attention_done(items, done)

    def _attention_done(self, items: list[int], done: int) -> None:
        """Count the arrivals that attention adds to the grid for its outputs, which starts at counter `done`, and let
        the groups of tasks that read these outputs wait for them. `items` are the attention groups."""
        dims = self.tasks.dims
        for g in items:
            group = self.groups[g]
            low, high = block_rows(dims, group.block)
            to = self._output_rank(group.rank)
            counter = Counter(done + group.block, dims.owner(low) if to == rec.OWNER else to)
            heads = self.tasks.rank_dims[group.rank].split.rank_kv_heads
            self.arrivals_by_table[counter] = self.arrivals_by_table.get(counter, 0) + (high - low) * heads
        for g in items:
            for consumer in {c for _, successors in self.within.pop(g, ()) for c in successors}:
                at = (self.groups[consumer].rank, rec.ALL_RANKS)
                blocks = {c.number for c in self.arrivals_by_table if c.rank in at} if not self.by_blocks else set()
                self.waited[consumer] |= blocks or {done + self.groups[g].block}

    def _tasks(self, g: int) -> PhaseTasks:
        return self.tasks.segments[self.groups[g].segment][self.groups[g].tasks]

    def _output_rank(self, rank: int) -> int:
        """Return whose counters attention on `rank` signals: those of the rank, of all ranks, or of the rows' owner."""
        dims = self.tasks.dims
        if not dims.split.replicated_o:
            return rank
        return rec.ALL_RANKS if dims.split.replicated_residual else rec.OWNER

    def final_row_grid(self) -> None:
        """Create a grid with one counter for each row block of the final rows (the residual rows after the last layer).
        Entering the counters into `self.shared` makes `groups_done` use them."""
        rows = [g for g, group in enumerate(self.groups) if group.index is Index.LOGIT_ROW]
        if not rows:
            return
        base = self._new(SHARED, self.tasks.dims.bucket.row_blocks)
        for g in rows:
            picked = {target for targets in self.onward.values() for target in targets if g in target[1]}
            if len(picked) != 1:
                raise AssertionError(
                    "a residual row after the last layer must wait for exactly one counter of that layer"
                )
            rank, successors = picked.pop()
            self.shared["onward", rank, successors] = Counter(base + self.groups[g].block, rank)
            group = self.groups[g]
            self.waits[group.segment][group.tasks][:, 0] = rec.counter_word(base, indexed=True)

    def groups_done(self) -> dict[int, set[Counter]]:
        """Let each group of tasks signal counters for which its successors wait. Return, for each group that waits for
        the previous layer, the counters that the previous layer signals for it."""
        for producer, group in enumerate(self.groups):
            within = [self._counter(f"within {group.segment}", *to) for to in self.within.get(producer, ())]
            onward = [self._counter("onward", *to) for to in self.onward.get(producer, ())]
            signals = [c.signal() for c in within] + [c.signal(next_layer=True) for c in onward]
            _append(self.signals[group.segment][group.tasks], group.members, *signals)
        entered: dict[int, set[Counter]] = defaultdict(set)
        for (run, _, successors), counter in self.shared.items():
            for consumer in successors:
                self.waited[consumer].add(counter.number)
                if run == "onward":
                    entered[consumer].add(counter)
        return dict(entered)

    def _counter(self, run: str, rank: int, successors: frozenset[int]) -> Counter:
        key = run, rank, successors
        if key not in self.shared:
            self.shared[key] = Counter(self._new(SHARED if rank == rec.ALL_RANKS else rank), rank)
        return self.shared[key]

    def prologue_done(self, onward: dict[int, set[Counter]]) -> None:
        """Let the prologue take the place of a layer before layer 0. Each layer signals counters of the next layer, so
        the prologue signals these counters of layer 0. Then all layers have the same waits, but counters may have other
        totals in layer 0. `onward` is the result of `groups_done`."""

        @cache
        def gate(consumer: int) -> int | None:
            """Return the group by which `consumer` waits for the previous layer: `consumer` itself, or a group that it
            waits for, directly or through other groups. Return None if there is none."""
            if consumer in onward:
                return consumer
            gates = map(gate, self.producers.get(consumer, ()))
            return next((g for g in gates if g is not None), None)

        signallers: dict[Counter, set[int]] = defaultdict(set)  # counter -> the groups of prologue tasks that signal it
        for producer, consumers in self.entering.items():
            gates = {consumer: gate(consumer) for consumer in consumers}
            for g in gates.values():
                if g is not None:
                    signallers[min(onward[g])].add(producer)
            # The remaining consumers wait for no previous layer, so they wait for the prologue in layer 0 only.
            for rank, alone in self._targets(producer, (c for c, g in gates.items() if g is None)):
                counter = self._counter("entering", rank, alone)
                signallers[counter].add(producer)
                for consumer in alone:
                    self.waited[consumer].add(counter.number)
        self._signal_the_rest(onward, signallers)
        for counter, producers in sorted(signallers.items()):
            for producer in sorted(producers):
                group = self.groups[producer]
                _append(self.signals[group.segment][group.tasks], group.members, counter.signal())

    def _signal_the_rest(self, onward: dict[int, set[Counter]], signallers: dict[Counter, set[int]]) -> None:
        """Choose prologue tasks to signal the remaining counters, those that a layer signals for the next layer but no
        prologue task signals so far. Otherwise a wait for such a counter in layer 0 would never end. Tasks with the
        same rows and with few signals are preferred. `signallers` maps each counter to its prologue groups."""
        by_block: dict[int, list[int]] = defaultdict(list)
        for g, group in enumerate(self.groups):
            if group.segment == PROLOGUE:
                by_block[group.block].append(g)
        anywhere = sorted(g for groups in by_block.values() for g in groups)
        load = Counting(g for producers in signallers.values() for g in producers)
        for counter, consumer in sorted((c, g) for g, counters in onward.items() for c in counters):
            group = self.groups[consumer]
            if group.segment == BODY and counter not in signallers:
                chosen = min(by_block.get(group.block, anywhere), key=lambda g: (load[g], g))
                signallers[counter].add(chosen)
                load[chosen] += 1

    def wait_for_groups(self) -> None:
        """Write the waits of each group of tasks into its wait words. If a group waits for more counters than there are
        words, `join` instructions wait for some of them."""
        for consumer in sorted(self.waited):
            group = self.groups[consumer]
            if group.virtual:
                continue
            words = self.waits[group.segment][group.tasks]
            room = rec.WAITS - int(np.count_nonzero(words[group.members[0]]))
            wanted = [rec.counter_word(counter) for counter in sorted(self.waited[consumer])]
            while len(wanted) > room:
                head, wanted = wanted[: rec.WAITS], wanted[rec.WAITS :]
                joined = Counter(self._new(group.rank), group.rank)
                signal = np.array([joined.signal()], np.int32)
                self.joins.append(Join(group.segment, group.tasks, group.members, np.array(head, np.int32), signal))
                wanted.append(rec.counter_word(joined.number))
            _append(words, group.members, *wanted)

    def sync(self) -> Sync:
        tp = self.tasks.dims.split.tp
        barrier = self._new(SHARED, 2) if tp > 1 else None
        numbers = self._numbers()
        for words in (w for segments in (self.waits, self.signals) for s in segments for w in s):
            _renumber(words, numbers)
        for join in self.joins:
            _renumber(join.waits, numbers)
            _renumber(join.signal, numbers)
        counters = int(numbers.max(initial=-1)) + 1
        prologue, _ = self._arrivals(PROLOGUE, counters)
        body, onward = self._arrivals(BODY, counters)
        epilogue, _ = self._arrivals(EPILOGUE, counters)
        for counter, arrivals in self.arrivals_by_table.items():
            body[slice(None) if counter.rank == rec.ALL_RANKS else counter.rank, numbers[counter.number]] += arrivals
        ends = None if barrier is None else (int(numbers[barrier]), int(numbers[barrier + 1]))
        if ends:
            epilogue[:, ends[0]] += self.tasks.machine.workers
            epilogue[:, ends[1]] += tp
        return Sync(self.waits, self.signals, self.joins, ends, prologue + body, body + onward, onward + epilogue)

    def _new(self, home: int, count: int = 1) -> int:
        self.homes += [home] * count
        return len(self.homes) - count

    def _numbers(self) -> NDArray[np.int32]:
        """Return the final number of each counter: its index among the counters of its rank. Shared counters come first
        and have the same number on all ranks. Then come those that only one rank uses."""
        homes = np.array(self.homes, dtype=np.int32)
        out = np.zeros(len(homes), dtype=np.int32)
        start = int((homes == SHARED).sum())
        for home in np.unique(homes):
            own = np.flatnonzero(homes == home)
            out[own] = np.arange(len(own)) + (0 if home == SHARED else start)
        return out

    def _arrivals(self, segment: int, counters: int) -> tuple[Totals, Totals]:
        """Return how many arrivals a segment (prologue, layer or epilogue) adds to each counter, as two arrays [ranks,
        counters]: one for the counters of its own layer, and one for those of the next layer."""
        tp = self.tasks.dims.split.tp
        words = np.concatenate(
            [w.ravel() for w in self.signals[segment]] + [j.signal for j in self.joins if j.segment == segment]
        )
        words = words[(words != 0) & (words & rec.INDEXED == 0)]
        out = []
        for part in (words[words & rec.NEXT == 0], words[words & rec.NEXT != 0]):
            to = rec.word_rank(part).astype(np.int64)
            counts = np.bincount(to * counters + rec.word_counter(part), minlength=(rec.ALL_RANKS + 1) * counters)
            counts = counts.reshape(-1, counters).astype(np.int32)
            out.append(counts[:tp] + counts[rec.ALL_RANKS])
        return out[0], out[1]


def _renumber(words: Words, numbers: NDArray[np.int32]) -> None:
    """Replace the counter number in each wait or signal word by its final number, in place."""
    named = words[words != 0]
    words[words != 0] = named & ~rec.COUNTER_MASK | numbers[rec.word_counter(named)] + 1


def _successors(edges: set[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the consumers of each producer, from edges (producer, consumer). Both are in ascending order."""
    out: dict[int, list[int]] = defaultdict(list)
    for producer, consumer in sorted(edges):
        out[producer].append(consumer)
    return dict(out)


def _append(words: Words, tasks: NDArray[np.int64], *new: int) -> None:
    """Write `new` into the first free columns of `words` for each of `tasks`. Raises AssertionError if there are too
    few."""
    column = np.add.reduce(words[tasks] != 0, axis=1)
    if column.max(initial=0) + len(new) > words.shape[1]:
        raise AssertionError(f"a task has more than {words.shape[1]} waits or signals")
    words[tasks[:, None], column[:, None] + np.arange(len(new))] = new
