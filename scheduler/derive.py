"""Which tasks must precede which, derived from the regions that the instruction table declares.

Tasks are handled in groups: those of one phase in one row block. On the layers that can tell neighbours apart
(prologue, body, body, epilogue) every two groups that touch one element, one of them writing, are compared box
by box. An edge is kept unless the kept ones already imply it. Where only some tasks of a group precede some of
another and nothing implies it, the groups are cut until an edge holds between all of both.

An access that the step table picks is represented by one virtual group per row block, "whatever touches rows
of this block": as a consumer it is what an INDEXED wait waits for, as a producer what an INDEXED signal says.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, Buffer, Dims, Index, Kind
from .lower import Phase, Tasks
from .regions import Boxes, block_box, boxes, head_group_boxes, nonempty, overlap

PROLOGUE, BODY, EPILOGUE = range(3)


@dataclass(frozen=True)
class Touch:
    """Boxes of one buffer that members of a group touch; `member` numbers the group's tasks or head groups."""

    buffer: Buffer
    writes: bool
    boxes: Boxes
    member: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Group:
    """Tasks of one phase that share a row block. `index` is NONE for real groups, else how the table picks."""

    segment: int
    phase: int
    block: int
    index: Index
    members: NDArray[np.int64]  # tasks of the phase; for a virtual group head groups (ITEM) or one member
    touches: tuple[Touch, ...]

    @property
    def virtual(self) -> bool:
        return self.index is not Index.NONE


Edge = tuple[int, int]  # producer, consumer: indices into Dependencies.groups


@dataclass(frozen=True)
class Dependencies:
    """Kept edges between groups: inside a segment, into the next body or the epilogue, and out of the prologue."""

    groups: list[Group]
    within: set[Edge] = field(default_factory=set)
    onward: set[Edge] = field(default_factory=set)
    entering: set[Edge] = field(default_factory=set)


def derive(tasks: Tasks) -> Dependencies:
    labels = [[phase.block.astype(np.int64) for phase in segment] for segment in tasks.segments]
    while True:
        groups = [
            group
            for segment, phases in enumerate(tasks.segments)
            for number, phase in enumerate(phases)
            for group in _groups(segment, number, phase, labels[segment][number], tasks.dims)
        ]
        found = _edges(groups, min(tasks.dims.layers, 2))
        if isinstance(found, Dependencies):
            return found
        for group, parts in found:
            label = labels[group.segment][group.phase]
            label[group.members] = label.max() + 1 + parts


def relation(producer: Group, consumer: Group) -> NDArray[np.bool_]:
    """[producer's members, consumer's members]: which conflict on an element."""
    out = np.zeros((len(producer.members), len(consumer.members)), dtype=bool)
    for p in producer.touches:
        for c in consumer.touches:
            if p.buffer is c.buffer and (p.writes or c.writes):
                i, j = np.nonzero(overlap(p.boxes, c.boxes))
                out[p.member[i], c.member[j]] = True
    return out


def _groups(segment: int, number: int, phase: Phase, labels: NDArray[np.int64], dims: Dims) -> list[Group]:
    """Real groups by label, then virtual ones by row block."""
    accesses = phase.instruction.accesses(phase.columns, dims)
    plain = [(a, boxes(a)) for a in accesses if a.index is Index.NONE]
    out = []
    order = np.argsort(labels, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if plain else ():
        touches = []
        for access, all_boxes in plain:
            inside = np.flatnonzero(nonempty(all_boxes[members]))
            if len(inside):
                own = all_boxes[members[inside]]
                touches.append(Touch(access.buffer, access.kind is not Kind.READ, own, inside))
        out.append(Group(segment, number, int(phase.block[members[0]]), Index.NONE, members, tuple(touches)))
    for index in (Index.ITEM, Index.LOGIT_ROW):
        picked = [a for a in accesses if a.index is index]
        for block in range(dims.row_blocks) if picked else ():
            touches = []
            for access in picked:
                if index is Index.ITEM:
                    part = head_group_boxes(access, dims, block, int(phase.columns["group_heads"][0]))
                else:
                    part = block_box(access, dims, block)
                touches.append(Touch(access.buffer, access.kind is not Kind.READ, part, np.arange(len(part))))
            members = np.arange(max(len(t.member) for t in touches))
            out.append(Group(segment, number, block, index, members, tuple(touches)))
    return out


Cut = list[tuple[Group, NDArray[np.int64]]]


def _edges(groups: list[Group], layers: int) -> Dependencies | Cut:
    """Transitive reduction of the conflicts; or the groups to cut, with a part number for each member."""
    copies = [PROLOGUE, *[BODY] * layers, EPILOGUE]
    node_group = [g for copy in copies for g, group in enumerate(groups) if group.segment == copy]
    node_copy = [c for c, copy in enumerate(copies) for group in groups if group.segment == copy]
    before = [0] * len(node_group)  # bit sets: the nodes that precede each node
    found = Dependencies(groups)
    for b, producers in enumerate(_candidates(groups, node_group, node_copy)):
        gb = node_group[b]
        consumer = groups[gb]
        for a in producers[::-1].tolist():
            # Nearest first: whatever implies this edge passes through a later producer of the same consumer.
            if before[b] >> a & 1:
                continue
            producer = groups[node_group[a]]
            conflicts = relation(producer, consumer)
            if not conflicts.any():
                continue
            # A body is the same in every layer, so it cannot tell tasks of the prologue apart.
            if producer.segment != PROLOGUE and not _whole(conflicts, producer, consumer):
                return _cut(conflicts, producer, consumer)
            # What a LOGIT_ROW consumer waits for varies, so it implies nothing for others; it has no successors.
            before[b] |= before[a] | 1 << a
            _keep(found, (node_group[a], gb), copies, node_copy[a], node_copy[b])
    return found


def _candidates(
    groups: list[Group], node_group: Sequence[int], node_copy: Sequence[int]
) -> Iterator[NDArray[np.int64]]:
    """For each node in order, the earlier nodes whose hulls overlap its own on a buffer that one of them writes."""
    touched: dict[tuple[Buffer, int], list[tuple[int, int, int, int, int, int]]] = defaultdict(list)
    for node, g in enumerate(node_group):
        for t in groups[g].touches:
            layer = node_copy[node] if BUFFERS[t.buffer].layered else 0
            low, high = t.boxes.min(axis=0).tolist(), t.boxes.max(axis=0).tolist()
            touched[t.buffer, layer].append((low[0], high[1], low[2], high[3], node, int(t.writes)))
    pairs = [_overlapping(np.array(sorted(rows), dtype=np.int64)) for rows in touched.values()]
    a, b = np.concatenate(pairs, axis=1)
    run = np.array(node_copy) * (1 + max(g.phase for g in groups)) + [groups[g].phase for g in node_group]
    a, b = np.unique(np.stack([a, b])[:, run[a] < run[b]], axis=1)
    order = np.argsort(b, kind="stable")
    ends = np.searchsorted(b[order], np.arange(len(node_group) + 1))
    for first, last in itertools.pairwise(ends.tolist()):
        yield a[order[first:last]]


def _overlapping(hulls: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, pairs] of nodes; a hull is (row, row_end, col, col_end, node, writes), sorted by row.

    Hulls are short in rows, so those that may overlap one lie in a short range of the sorted ones.
    """
    row, row_end, col, col_end, node, writes = hulls.T
    first = np.searchsorted(row, row - (row_end - row).max(), side="right")
    count = np.searchsorted(row, row_end) - first
    i = np.repeat(np.arange(len(row)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    meet = (row[i] < row_end[j]) & (col[i] < col_end[j]) & (col[j] < col_end[i]) & ((writes[i] | writes[j]) != 0)
    return np.stack([node[i[meet]], node[j[meet]]])


def _whole(conflicts: NDArray[np.bool_], producer: Group, consumer: Group) -> bool:
    """Whether the edge holds between all members. A virtual group is one: it is complete when all of it is."""
    members: tuple[int, ...] = (0,) * producer.virtual + (1,) * consumer.virtual
    return bool(np.any(conflicts, axis=members).all())


def _cut(conflicts: NDArray[np.bool_], producer: Group, consumer: Group) -> Cut:
    """Parts of both groups whose members have the same conflicts."""
    cut = []
    for group, rows in ((producer, conflicts), (consumer, conflicts.T)):
        parts = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        if not group.virtual and parts.max() > 0:
            cut.append((group, parts.astype(np.int64)))
    if not cut:
        raise AssertionError("an access that the step table picks needs part of what a group of tasks writes")
    return cut


def _keep(found: Dependencies, edge: Edge, copies: list[int], first: int, second: int) -> None:
    if first == second:
        found.within.add(edge)
    elif second != first + 1:
        raise AssertionError(f"tasks of segment {copies[first]} must precede tasks that are not in the next run")
    elif copies[first] == PROLOGUE:
        found.entering.add(edge)
    else:
        found.onward.add(edge)
