"""Derives which tasks (tiles of work) must precede which, from the regions of buffers that each operation declares to
read and write.

Tasks are handled in groups: a group has the tasks of one phase (operation) in one row block (range of token rows). The
analysis covers the prologue, two runs of the body, which is one layer, and the epilogue; two runs suffice to find the
edges between neighbouring layers. Two groups conflict if they touch a common part of the same rank's copy of a buffer
and at least one of them writes it. There is then an edge: all tasks of the group that is earlier in program order must
precede all tasks of the later group. An edge that other edges imply is left out.

Some tasks touch rows that are known only when a step's inputs, the step table, are known. For these tasks, each row
block has a virtual group, which means "every task that touches rows of this block". An edge to a virtual group becomes
an INDEXED wait, and an edge from a virtual group becomes an INDEXED signal: the step table says which counter it uses.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, Buffer, Dims, Index, Kind, accesses
from megakernel.isa.ragged import ragged
from megakernel.scheduler.regions import boxes, hulls, nonempty
from megakernel.scheduler.tasks import PhaseTasks, Stages, Tasks, ordinals

PROLOGUE, BODY, EPILOGUE = range(3)


@dataclass(frozen=True)
class Touch:
    """One access of a group to a buffer. `ranks` lists the ranks whose copies of the buffer the group reads or writes.
    `box` (row, row_end, col, col_end) is the smallest rectangle around all elements that the group touches."""

    buffer: Buffer
    ranks: Sequence[int]
    writes: bool
    box: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """The tasks of one phase (operation) in one row block (range of token rows). A real group has the `index` NONE. A
    virtual group has no `members`: it stands for rows of the block that any task of the phase computes if the step's
    inputs select them, such as rows with logits; `index` says how. `tasks` is the index of the group's PhaseTasks in
    the segment (prologue, layer or epilogue). `ordinal` numbers its phases in program order, equally on all ranks."""

    segment: int
    tasks: int
    ordinal: int
    rank: int
    block: int
    index: Index
    members: NDArray[np.int64]  # indices of the group's tasks in its PhaseTasks; empty for a virtual group
    touches: tuple[Touch, ...]

    @property
    def virtual(self) -> bool:
        return self.index is not Index.NONE


class TaskGroup(NamedTuple):
    """One execution of a group of tasks. `group` is the group's index in Dependencies.groups. `copy` numbers the
    executions: 0 for the prologue, then one number for each of up to two layers, then the epilogue."""

    group: int
    copy: int


Edge = tuple[int, int]  # (producer, consumer): the consumer waits; indices into Dependencies.groups


@dataclass(frozen=True)
class Dependencies:
    """The edges (producer, consumer) between groups of tasks: `within` one run of a segment, `onward` from one layer
    into the next layer or the epilogue, and `entering` from the prologue into a layer."""

    groups: list[Group]
    within: set[Edge] = field(default_factory=set)
    onward: set[Edge] = field(default_factory=set)
    entering: set[Edge] = field(default_factory=set)


def derive(tasks: Tasks, stages: Stages | None = None) -> Dependencies:
    """Return the edges between groups of tasks that conflict: both touch the same data, and at least one writes it.
    Edges that other edges imply are left out (the transitive reduction). `stages` caches which data the tasks touch."""
    stages = stages or Stages()
    groups: list[Group] = []
    for segment, parts in enumerate(tasks.segments):
        for number, (part, ordinal) in enumerate(zip(parts, ordinals(parts), strict=True)):
            d = tasks.dims.ranks[part.rank]
            of_part = stages.once(("groups", part.content, d), partial(_groups, part, d))
            groups += [Group(segment, number, ordinal, part.rank, *fields) for fields in of_part]
    copies = [PROLOGUE, *[BODY] * min(tasks.dims.model.layers, 2), EPILOGUE]
    nodes = [
        TaskGroup(g, c) for c, copy in enumerate(copies) for g, group in enumerate(groups) if group.segment == copy
    ]
    before = [0] * len(nodes)  # for each node, a bit set of the nodes that must precede it
    found = Dependencies(groups)
    for b, producers in enumerate(_candidates(groups, nodes)):
        items = groups[nodes[b].group].index is Index.ITEM
        # The groups that group `b` waits for and that belong to the same run of a layer as `b`.
        waited: list[int] = []
        # Leave out edges that other edges imply. The edge from `a` to `b` is implied if group `a` must precede another
        # group that `b` waits for. That group is later than `a`, so visit the latest producer of `b` first.
        for a in reversed(producers):
            if before[b] >> a & 1:
                continue
            if items and nodes[a].copy != nodes[b].copy:
                # An attention item (a piece of attention work) can wait only for counters of its own layer. So it
                # cannot wait for `a`, which belongs to the previous layer. Instead, the producers that the item does
                # wait for must wait for `a`.
                consumers = [p for p in waited if not before[p] >> a & 1]
            else:
                waited.append(a)
                consumers = [b]
            for consumer in consumers:
                _keep(found, copies, nodes[a], nodes[consumer])
            for node in {b, *consumers}:
                # A LOGIT_ROW consumer waits only for the rows that the step selects, so an edge to this consumer must
                # not replace an edge between other groups. This never happens, because nothing depends on a LOGIT_ROW
                # consumer.
                before[node] |= before[a] | 1 << a
    return found


def _groups(part: PhaseTasks, d: Dims) -> list[tuple[int, Index, NDArray[np.int64], tuple[Touch, ...]]]:
    """Return the groups of one phase's tasks on one rank, as the last four fields of `Group`. The real groups, one for
    each row block in which the phase has tasks, come first. Then come the virtual groups, one for each row block that
    only the step's inputs can select."""
    touched_by = accesses(part.phase, part.columns, d)
    order = np.argsort(part.block, kind="stable")
    starts = np.flatnonzero(np.diff(part.block[order], prepend=-1))
    touches: list[list[Touch]] = [[] for _ in starts]
    for access in (a for a in touched_by if a.index in (Index.NONE, Index.LOGIT_OWNER)):
        around = hulls(boxes(access)[order], starts)
        several = access.rank[order[starts]].tolist() if isinstance(access.rank, np.ndarray) else None
        one = access.copies(d) if several is None else ()
        for g in np.flatnonzero(nonempty(around)).tolist():
            at = one if several is None else (several[g],)
            touches[g].append(Touch(access.buffer, at, access.kind is not Kind.READ, tuple(around[g].tolist())))
    blocks = part.block[order[starts]].tolist()
    found: list[tuple[int, Index, NDArray[np.int64], tuple[Touch, ...]]] = []
    for block, members, touched in zip(blocks, np.split(order, starts[1:]), touches, strict=True):
        if touched:
            found.append((block, Index.NONE, members, tuple(touched)))
    for index in (Index.ITEM, Index.LOGIT_ROW):
        picked = [a for a in touched_by if a.index is index]
        for block in range(d.bucket.row_blocks) if picked else ():
            owner = d.owner(block * d.bucket.row_block)
            if index is Index.LOGIT_ROW and not d.split.replicated_residual and owner != d.split.rank:
                continue
            parts = tuple(
                Touch(
                    access.buffer,
                    (owner,) if access.rank is None else access.copies(d),
                    access.kind is not Kind.READ,
                    # The inputs of a step may select any row, so a virtual group touches all rows of its row block.
                    (*d.block_rows(block), int(access.col[0]), int(access.col_end[0])),
                )
                for access in picked
            )
            found.append((block, index, np.zeros(0, np.int64), parts))
    return found


def _candidates(groups: list[Group], nodes: list[TaskGroup]) -> Iterator[list[int]]:
    """Yield, for each node (one run of a group of tasks) in order, the earlier nodes that may conflict with it: their
    bounding boxes in some buffer overlap, and at least one of the two nodes writes the buffer."""
    touched: dict[tuple[Buffer, int, int], list[tuple[int, int, int, int, int, int]]] = defaultdict(list)
    for n, node in enumerate(nodes):
        for t in groups[node.group].touches:
            layer = node.copy if BUFFERS[t.buffer].layered else 0
            row, row_end, col, col_end = t.box
            for rank in t.ranks:
                touched[t.buffer, layer, rank].append((row, row_end, col, col_end, n, int(t.writes)))
    pairs = [_overlapping(np.array(sorted(rows), dtype=np.int64)) for rows in touched.values()]
    a, b = np.concatenate(pairs, axis=1)
    phases = 1 + max(group.ordinal for group in groups)
    run = np.array([node.copy * phases + groups[node.group].ordinal for node in nodes])
    keep = run[a] < run[b]
    pair = np.unique(b[keep] * len(run) + a[keep])
    producer = (pair % len(run)).tolist()
    ends = np.searchsorted(pair // len(run), np.arange(len(nodes) + 1)).tolist()
    for first, last in itertools.pairwise(ends):
        yield producer[first:last]


def _overlapping(hulls: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs of nodes (runs of groups of tasks) whose boxes overlap, where at least one of the two writes: an
    array [2, pairs]. `hulls` [boxes, 6] has row, row_end, col, col_end, node and writes of each box, and is sorted. A
    box covers few rows of its buffer, so all boxes that may overlap it lie in a short range of the sorted boxes."""
    row, row_end, col, col_end, node, writes = hulls.T
    first = np.searchsorted(row, row - (row_end - row).max(), side="right")
    count = np.searchsorted(row, row_end) - first
    i, nth = ragged(count)
    j = first[i] + nth
    meet = (row[i] < row_end[j]) & (col[i] < col_end[j]) & (col[j] < col_end[i]) & ((writes[i] | writes[j]) != 0)
    return np.stack([node[i[meet]], node[j[meet]]])


def _keep(found: Dependencies, copies: list[int], producer: TaskGroup, consumer: TaskGroup) -> None:
    edge = producer.group, consumer.group
    if producer.copy == consumer.copy:
        found.within.add(edge)
    elif consumer.copy != producer.copy + 1:
        raise AssertionError(
            f"a task waits for segment {copies[producer.copy]}, but only its own and the previous segment are allowed"
        )
    elif copies[producer.copy] == PROLOGUE:
        found.entering.add(edge)
    else:
        found.onward.add(edge)
