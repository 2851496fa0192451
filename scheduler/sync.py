"""Turns dependencies between groups of tasks into counters, the integers in device memory by which instructions wait
for each other. A record (an encoded instruction) has one word for each of its waits and signals.

A counter means "these groups of tasks are done". Its total is the number of arrivals that its signals add. Groups with
the same successors share a counter, so a task signals few counters and most consumers wait for one counter.

Attention and the norm of logit rows read rows that the step's inputs (the step table) select. So the step table also
selects the counters to wait for. These counters form three grids: [row block][KV-head group] for the inputs of
attention, [row block] for its outputs, and [row block] for the final rows, which are the residual rows after the last
layer.

`synchronise` calls several functions in turn. Each one creates counters, and returns them with their signals and waits
as `Links`. The last function, `_written`, numbers all counters and writes the words."""

from __future__ import annotations

from collections import Counter as Counting
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Index
from megakernel.isa import record as rec
from megakernel.scheduler.derive import BODY, EPILOGUE, PROLOGUE, Dependencies, Group
from megakernel.scheduler.regions import head_groups
from megakernel.scheduler.tasks import PhaseTasks, Tasks

Words = NDArray[np.int32]
Totals = NDArray[np.int32]  # [ranks, counters]
K = TypeVar("K")
V = TypeVar("V")

SHARED = -1  # home of a counter that is signalled on all ranks at once, and so has the same number on each


class Target(NamedTuple):
    """What a signal names: a counter, and the rank whose copy of the counter gets the signal, or ALL_RANKS, or OWNER.
    Counters are first numbered in the order in which they are created; `_numbers` gives the final numbers."""

    counter: int
    rank: int

    def signal(self, *, next_layer: bool = False, indexed: bool = False) -> int:
        return rec.counter_word(self.counter, rank=self.rank, next_layer=next_layer, indexed=indexed)


class Signals(NamedTuple):
    """The encoded signals (`words`) of some tasks: the tasks `members` of the segment's PhaseTasks number `tasks`."""

    segment: int
    tasks: int
    members: NDArray[np.int64]
    words: Sequence[int]


class Successors(NamedTuple):
    """The groups of tasks on `rank` that wait for one group. ALL_RANKS means that the same tasks wait on every rank."""

    rank: int
    groups: frozenset[int]


@dataclass(frozen=True)
class Links:
    """The counters that one of the functions in `synchronise` creates, and who uses them.

    homes     for each counter, the only rank that uses it, or SHARED
    signals   encoded signals, in the order in which they are written into a task's record
    waits     the counters for which each group of tasks waits
    picks     (segment, index of PhaseTasks) -> the first counter of the grid from which the step's inputs select the
              counters for which these tasks wait
    arrivals  target -> how many arrivals it gets from signals whose counter the step's inputs select"""

    homes: Sequence[int] = ()
    signals: Sequence[Signals] = ()
    waits: Mapping[int, set[int]] = field(default_factory=dict)
    picks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    arrivals: Mapping[Target, int] = field(default_factory=dict)


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
    """The counters of a program. `waits` and `signals` have, for each segment (prologue, body, epilogue) and phase, an
    array of words [tasks, 8]. Each word names a counter. `barrier` has the two counters of the barrier at the end of a
    launch on several ranks. Totals are a counter's arrivals in the first layer, a middle layer and the epilogue."""

    waits: list[list[Words]]
    signals: list[list[Words]]
    joins: list[Join]
    barrier: tuple[int, int] | None
    totals_first: Totals
    totals_middle: Totals
    totals_last: Totals


def synchronise(tasks: Tasks, dependencies: Dependencies) -> Sync:
    """Return the counters by which tasks wait for each other. Tasks wait only for the row blocks that they read."""
    graph = _Graph(tasks, dependencies)
    attention = _attention_grids(graph)
    rows, final = _final_row_grid(graph, _next([attention]))
    groups, entered = _groups_done(graph, final, _next([attention, rows]))
    prologue = _prologue_done(graph, entered, _next([attention, rows, groups]))
    return _written(graph, [attention, rows, groups, prologue])


def _next(links: Iterable[Links]) -> int:
    """Return the number of the next new counter, after all counters of `links`."""
    return sum(len(each.homes) for each in links)


class _Graph:
    """Which groups of tasks wait for which. The functions in `synchronise` do not change it.

    items       the groups that stand for attention items
    to_items    the edges (producer, item) to attention items
    from_items  item -> what waits for it
    within      producer -> what waits for it in the same segment; edges to and from items are left out
    onward      producer -> what waits for it in the next layer or in the epilogue
    entering    producer in the prologue -> what waits for it in a layer
    producers   consumer -> what it waits for in the same segment"""

    def __init__(self, tasks: Tasks, found: Dependencies) -> None:
        self.tasks, self.groups = tasks, found.groups
        self.items = [g for g, group in enumerate(self.groups) if group.index is Index.ITEM]
        by_item = set(self.items)
        if by_item & {consumer for _, consumer in found.onward | found.entering}:
            raise AssertionError("attention items must not wait for counters of other layers")
        self._siblings: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for g in range(len(self.groups)):
            self._siblings[self._kind(g)].append(g)
        self.to_items = sorted(edge for edge in found.within if edge[1] in by_item)
        within = self._all_targets(found.within.difference(self.to_items))
        self.from_items = {p: to for p, to in within.items() if p in by_item}
        self.within = {p: to for p, to in within.items() if p not in by_item}
        self.onward = self._all_targets(found.onward)
        self.entering = _gathered(sorted(found.entering))
        self.producers = _gathered((consumer, producer) for producer, consumer in sorted(found.within))

    def phase_tasks(self, g: int) -> PhaseTasks:
        return self.tasks.segments[self.groups[g].segment][self.groups[g].tasks]

    def signals(self, g: int, words: Sequence[int]) -> Signals:
        return Signals(self.groups[g].segment, self.groups[g].tasks, self.groups[g].members, words)

    def _kind(self, g: int) -> tuple[int, ...]:
        """Return the key that a group of tasks shares with the same tasks on other ranks, its siblings: the phase and
        the row block. Siblings that exchange data with several ranks signal one counter."""
        group = self.groups[g]
        return group.segment, group.ordinal, int(group.virtual), group.block

    def _all_targets(self, edges: set[tuple[int, int]]) -> dict[int, list[Successors]]:
        return {producer: self.targets(to) for producer, to in _gathered(sorted(edges)).items()}

    def targets(self, successors: Iterable[int]) -> list[Successors]:
        """Return which ranks a group with these successors must signal, and the successors there.

        Siblings are the same tasks on different ranks. If successors on several ranks are siblings, all their siblings
        on ALL_RANKS stand for them."""
        out: dict[int, set[int]] = defaultdict(set)
        for kind, members in _gathered((self._kind(g), g) for g in successors).items():
            ranks = {self.groups[g].rank for g in members}
            if len(ranks) > 1:
                out[rec.ALL_RANKS].update(self._siblings[kind])
            else:
                out[ranks.pop()].update(members)
        return [Successors(rank, frozenset(groups)) for rank, groups in sorted(out.items())]


class _Shared:
    """Gives groups of tasks with the same successors the same counter. `first` is the number of the first new counter,
    and `known` has counters that exist already."""

    def __init__(self, first: int, known: Mapping[tuple[str, Successors], Target]) -> None:
        self.first, self.homes, self.known = first, list[int](), dict(known)

    def target(self, run: str, to: Successors) -> Target:
        if (run, to) not in self.known:
            self.known[run, to] = Target(self.first + len(self.homes), to.rank)
            self.homes.append(SHARED if to.rank == rec.ALL_RANKS else to.rank)
        return self.known[run, to]

    def waits(self) -> dict[int, set[int]]:
        waits = ((g, target.counter) for (_, to), target in self.known.items() for g in to.groups)
        return {g: set(counters) for g, counters in _gathered(waits).items()}


def _attention_grids(graph: _Graph) -> Links:
    """Create the two grids of counters for attention. The tasks that compute q, k and v signal the first grid, which is
    on the rank that runs the attention. Attention signals the second grid, which is on the rank that receives the
    attention output of the rows. The second grid is created first, so its counters have the row blocks' numbers."""
    if not graph.items:
        return Links()
    dims = graph.tasks.dims
    homes = [SHARED] * dims.bucket.row_blocks
    signals, picks = [], dict[tuple[int, int], int]()
    # rank -> (the first counter of the grid for the items' inputs on this rank, the number of KV-head groups)
    ready: dict[int, tuple[int, int]] = {}
    arrivals, waits = Counting[Target](), defaultdict[int, set[int]](set)
    for g in graph.items:
        group, attention, to = graph.groups[g], graph.phase_tasks(g), _output_rank(graph, graph.groups[g].rank)
        # An item adds an arrival for each row and KV head to its row block's counter. Its successors wait for that one.
        low, high = dims.block_rows(group.block)
        block = Target(group.block, dims.owner(low) if to == rec.OWNER else to)
        arrivals[block] += (high - low) * dims.ranks[group.rank].split.rank_kv_heads
        for consumer in {c for successors in graph.from_items.get(g, ()) for c in successors.groups}:
            waits[consumer].add(group.block)
        if group.rank in ready:
            continue
        heads = int(attention.columns["groups"][0])
        ready[group.rank] = len(homes), heads
        picks[group.segment, group.tasks] = len(homes)
        homes += [group.rank] * (dims.bucket.row_blocks * heads)
        done = Target(0, to).signal(indexed=True)
        signals.append(Signals(group.segment, group.tasks, np.arange(len(attention)), [done]))
    touched_by: dict[int, NDArray[np.bool_]] = {}
    for producer, consumer in graph.to_items:
        group, item = graph.groups[producer], graph.groups[consumer]
        if group.tasks not in touched_by:
            touched_by[group.tasks] = _feeds(graph, producer, consumer)
        touched = touched_by[group.tasks][group.members]
        if group.rank != item.rank or not touched.any(axis=1).all():
            raise AssertionError("attention items must wait only for tasks of their own rank that write their inputs")
        first, heads = ready[item.rank]
        for head in range(heads):
            word = Target(first + item.block * heads + head, item.rank).signal()
            signals.append(Signals(group.segment, group.tasks, group.members[touched[:, head]], [word]))
    return Links(homes, signals, waits, picks, arrivals)


def _feeds(graph: _Graph, producer: int, item: int) -> NDArray[np.bool_]:
    """Return a mask [tasks, KV-head groups]: whether a task of the producer computes what a group reads."""
    attention, made = graph.phase_tasks(item), graph.phase_tasks(producer)
    rank_dims = graph.tasks.dims.ranks[graph.groups[item].rank]
    return head_groups(made.phase, made.columns, attention.phase, rank_dims, int(attention.columns["group_heads"][0]))


def _output_rank(graph: _Graph, rank: int) -> int:
    """Return the rank whose counters attention on `rank` signals: `rank`, ALL_RANKS, or OWNER (the rows' owner)."""
    split = graph.tasks.dims.split
    if not split.replicated_o:
        return rank
    return rec.ALL_RANKS if split.replicated_residual else rec.OWNER


def _final_row_grid(graph: _Graph, first: int) -> tuple[Links, dict[tuple[str, Successors], Target]]:
    """Create a grid with one counter for each row block of the final rows (the residual rows after the last layer). The
    second result maps successors to the counter that groups of tasks with these successors must signal."""
    rows = [g for g, group in enumerate(graph.groups) if group.index is Index.LOGIT_ROW]
    if not rows:
        return Links(), {}
    known = {}
    for g in rows:
        picked = {to for targets in graph.onward.values() for to in targets if g in to.groups}
        if len(picked) != 1:
            raise AssertionError("a residual row after the last layer must wait for exactly one counter of that layer")
        to = picked.pop()
        known["onward", to] = Target(first + graph.groups[g].block, to.rank)
    picks = {(graph.groups[g].segment, graph.groups[g].tasks): first for g in rows}
    return Links([SHARED] * graph.tasks.dims.bucket.row_blocks, picks=picks), known


def _groups_done(
    graph: _Graph, final: Mapping[tuple[str, Successors], Target], first: int
) -> tuple[Links, dict[int, set[Target]]]:
    """Let each group of tasks signal counters for which its successors wait. `final` is the second result of
    `_final_row_grid`. Return the links and, for each group that waits for groups of the previous layer, the counters
    that those groups of the previous layer signal."""
    shared, signals = _Shared(first, final), []
    for producer, group in enumerate(graph.groups):
        within = [shared.target(f"within {group.segment}", to) for to in graph.within.get(producer, ())]
        onward = [shared.target("onward", to) for to in graph.onward.get(producer, ())]
        words = [target.signal() for target in within] + [target.signal(next_layer=True) for target in onward]
        signals.append(graph.signals(producer, words))
    entered = ((g, target) for (run, to), target in shared.known.items() if run == "onward" for g in to.groups)
    waited = {g: set(targets) for g, targets in _gathered(entered).items()}
    return Links(shared.homes, signals, shared.waits()), waited


def _prologue_done(graph: _Graph, entered: Mapping[int, set[Target]], first: int) -> Links:
    """Let the prologue take the place of a layer before layer 0. Each layer signals counters of the next layer, so the
    prologue signals these counters of layer 0. Then all layers have the same waits, but counters may have other totals
    in layer 0. `entered` has the counters that a layer signals for each group of the next layer."""

    @cache
    def gate(consumer: int) -> int | None:
        """Return the group by which `consumer` waits for the previous layer: `consumer` itself, or a group that it
        waits for, directly or through other groups. Return None if there is none."""
        if consumer in entered:
            return consumer
        gates = map(gate, graph.producers.get(consumer, ()))
        return next((g for g in gates if g is not None), None)

    shared = _Shared(first, {})
    signallers: dict[Target, set[int]] = defaultdict(set)  # counter -> the groups of prologue tasks that signal it
    for producer, consumers in graph.entering.items():
        for g in {g for consumer in consumers if (g := gate(consumer)) is not None}:
            signallers[min(entered[g])].add(producer)
        # Consumers without a gate do not wait for the previous layer. In layer 0, they wait for a prologue counter.
        for to in graph.targets(consumer for consumer in consumers if gate(consumer) is None):
            signallers[shared.target("entering", to)].add(producer)
    signallers |= _signallers_of_the_rest(graph.groups, entered, signallers)
    pairs = sorted((producer, target) for target, producers in signallers.items() for producer in producers)
    words = _gathered((producer, target.signal()) for producer, target in pairs)
    return Links(shared.homes, [graph.signals(*each) for each in words.items()], shared.waits())


def _signallers_of_the_rest(
    groups: Sequence[Group], entered: Mapping[int, set[Target]], signallers: Mapping[Target, set[int]]
) -> dict[Target, set[int]]:
    """Choose prologue tasks to signal the remaining counters, those that a layer signals for the next layer but no
    prologue task signals so far. Otherwise a wait for such a counter in layer 0 would never end. Tasks with the same
    rows and with few signals are preferred. `signallers` maps each counter to its prologue groups."""
    by_block = _gathered((group.block, g) for g, group in enumerate(groups) if group.segment == PROLOGUE)
    anywhere = sorted(g for block in by_block.values() for g in block)
    load = Counting(g for producers in signallers.values() for g in producers)
    out: dict[Target, set[int]] = {}
    for target, consumer in sorted((target, g) for g, targets in entered.items() for target in targets):
        group = groups[consumer]
        if group.segment == BODY and target not in signallers and target not in out:
            chosen = min(by_block.get(group.block, anywhere), key=lambda g: (load[g], g))
            out[target] = {chosen}
            load[chosen] += 1
    return out


def _written(graph: _Graph, links: Sequence[Links]) -> Sync:
    """Number the counters of all `links`, encode all waits and signals, and add up the arrivals of each counter."""
    tasks, tp = graph.tasks, graph.tasks.dims.split.tp
    homes = [home for each in links for home in each.homes]
    waits = [[np.zeros((len(part), rec.WAITS), np.int32) for part in segment] for segment in tasks.segments]
    signals = [[np.zeros((len(part), rec.SIGNALS), np.int32) for part in segment] for segment in tasks.segments]
    for segment, part, members, words in (each for step in links for each in step.signals):
        _append(signals[segment][part], members, words)
    picks = {at: counter for each in links for at, counter in each.picks.items()}
    for (segment, part), counter in picks.items():
        waits[segment][part][:, 0] = rec.counter_word(counter, indexed=True)
    joins: list[Join] = []
    waited = _gathered((g, counters) for each in links for g, counters in each.waits.items())
    for g in sorted(g for g in waited if not graph.groups[g].virtual):
        group = graph.groups[g]
        room = rec.WAITS - ((group.segment, group.tasks) in picks)
        words, needed = _joined(group, sorted(set().union(*waited[g])), room, len(homes))
        _append(waits[group.segment][group.tasks], group.members, words)
        joins += needed
        homes += [group.rank] * len(needed)
    homes += [SHARED] * (2 if tp > 1 else 0)  # of the barrier
    numbers = _numbers(homes)
    barrier = (int(numbers[-2]), int(numbers[-1])) if tp > 1 else None

    def numbered(words: Words) -> Words:
        return np.where(words != 0, words & ~rec.COUNTER_MASK | numbers[rec.word_counter(words)] + 1, 0)

    waits, signals = ([[numbered(words) for words in segment] for segment in each] for each in (waits, signals))
    joins = [replace(join, waits=numbered(join.waits), signal=numbered(join.signal)) for join in joins]
    counters = int(numbers.max(initial=-1)) + 1
    (before, _), (body, onward), (after, _) = (
        _arrivals([*signals[s], *(join.signal for join in joins if join.segment == s)], tp, counters)
        for s in (PROLOGUE, BODY, EPILOGUE)
    )
    first, middle, last = before + body, body + onward, onward + after
    for target, arrivals in (each for step in links for each in step.arrivals.items()):
        ranks = slice(None) if target.rank == rec.ALL_RANKS else target.rank
        for totals in (first, middle):
            totals[ranks, numbers[target.counter]] += arrivals
    if barrier:
        last[:, barrier] += (tasks.machine.workers, tp)
    return Sync(waits, signals, joins, barrier, first, middle, last)


def _joined(group: Group, counters: Sequence[int], room: int, first: int) -> tuple[list[int], list[Join]]:
    """Return the encoded waits of each task of a group that waits for `counters`. A task's record has room for `room`
    waits. If there are more, `join` instructions wait for some and signal new counters, numbered from `first`."""
    words, joins = [rec.counter_word(counter) for counter in counters], list[Join]()
    while len(words) > room:
        joined = Target(first + len(joins), group.rank)
        waits, signal = (np.array(each, np.int32) for each in (words[: rec.WAITS], [joined.signal()]))
        joins.append(Join(group.segment, group.tasks, group.members, waits, signal))
        words = [*words[rec.WAITS :], rec.counter_word(joined.counter)]
    return words, joins


def _numbers(homes: Sequence[int]) -> NDArray[np.int32]:
    """Return the final number of each counter: its index among the counters of its rank. Shared counters come first and
    have the same number on all ranks. Then come those that only one rank uses."""
    home = np.array(homes, dtype=np.int32)
    out = np.zeros(len(home), dtype=np.int32)
    start = int((home == SHARED).sum())
    for each in np.unique(home):
        own = np.flatnonzero(home == each)
        out[own] = np.arange(len(own)) + (0 if each == SHARED else start)
    return out


def _arrivals(signals: Sequence[Words], tp: int, counters: int) -> tuple[Totals, Totals]:
    """Return how many arrivals the signals of a segment (prologue, layer or epilogue) add to each counter, as two
    arrays [ranks, counters]: one for the counters of the segment's own layer, and one for those of the next layer."""
    words = np.concatenate([part.ravel() for part in signals])
    words = words[(words != 0) & (words & rec.INDEXED == 0)]
    out = []
    for part in (words[words & rec.NEXT == 0], words[words & rec.NEXT != 0]):
        to = rec.word_rank(part).astype(np.int64)
        counts = np.bincount(to * counters + rec.word_counter(part), minlength=(rec.ALL_RANKS + 1) * counters)
        counts = counts.reshape(-1, counters).astype(np.int32)
        out.append(counts[:tp] + counts[rec.ALL_RANKS])
    return out[0], out[1]


def _gathered(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    out: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        out[key].append(value)
    return dict(out)


def _append(words: Words, tasks: NDArray[np.int64], new: Sequence[int]) -> None:
    """Write `new` into the first free columns of `words` for each of `tasks`. Raises AssertionError if none is left."""
    column = np.add.reduce(words[tasks] != 0, axis=1)
    if column.max(initial=0) + len(new) > words.shape[1]:
        raise AssertionError(f"a task has more than {words.shape[1]} waits or signals")
    words[tasks[:, None], column[:, None] + np.arange(len(new))] = new
