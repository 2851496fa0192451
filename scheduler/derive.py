"""Derives which tasks must precede which, from the regions that phases declare.

Tasks are handled in groups: the tasks of one phase in one row block. The analysis covers the prologue, two runs of the
body and the epilogue; two runs suffice to find the edges between neighbouring layers. Two groups conflict if they touch
a common part of the same rank's copy of a buffer and one of them writes. All tasks of the group that is earlier in
program order then precede all tasks of the later group. An edge is kept unless other kept edges imply it.

If the step table selects what an access touches, one virtual group per row block represents the access: "whatever
touches rows of this block". A virtual consumer becomes an INDEXED wait, a virtual producer an INDEXED signal.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, EVERY, OWN, Buffer, Column, Dims, Index, Kind, accesses
from .regions import block_rows, boxes, hulls, nonempty
from .tasks import PhaseTasks, Tasks, ordinals

PROLOGUE, BODY, EPILOGUE = range(3)


@dataclass(frozen=True)
class Touch:
    """The smallest box (row, row_end, col, col_end) around everything that a group touches in the copies of a buffer on
    `ranks`.
    """

    buffer: Buffer
    ranks: Sequence[int]
    writes: bool
    box: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Tasks of one phase in one row block. `index` is NONE for a real group. For a virtual group, it says how the step
    table selects what the group touches.

    `tasks` is the index of its PhaseTasks in the segment. `ordinal` numbers the segment's phases in program order and
    is the same on every rank.
    """

    segment: int
    tasks: int
    ordinal: int
    rank: int
    block: int
    index: Index
    members: NDArray[np.int64]  # indices of its tasks; none for a virtual group
    touches: tuple[Touch, ...]

    @property
    def virtual(self) -> bool:
        return self.index is not Index.NONE


Edge = tuple[int, int]  # producer, consumer: indices into Dependencies.groups


@dataclass(frozen=True)
class Dependencies:
    """The kept edges between groups: `within` one run of a segment, `onward` from a run of the body into the next run
    or the epilogue, and `entering` from the prologue into the body.
    """

    groups: list[Group]
    within: set[Edge] = field(default_factory=set)
    onward: set[Edge] = field(default_factory=set)
    entering: set[Edge] = field(default_factory=set)


def derive(tasks: Tasks) -> Dependencies:
    """Compute the transitive reduction of the conflicts."""
    groups = [
        group
        for segment, parts in enumerate(tasks.segments)
        for number, (part, ordinal) in enumerate(zip(parts, ordinals(parts), strict=True))
        for group in _groups(segment, number, ordinal, part, tasks.rank_dims[part.rank])
    ]
    copies = [PROLOGUE, *[BODY] * min(tasks.dims.layers, 2), EPILOGUE]
    node_group = [g for copy in copies for g, group in enumerate(groups) if group.segment == copy]
    node_copy = [c for c, copy in enumerate(copies) for group in groups if group.segment == copy]
    before = [0] * len(node_group)  # bit sets: the nodes that precede each node
    found = Dependencies(groups)
    kept: dict[int, list[int]] = defaultdict(list)  # producers that an item waits for in its own run
    for b, producers in enumerate(_candidates(groups, node_group, node_copy)):
        by_item = groups[node_group[b]].index is Index.ITEM
        for a in reversed(producers):
            # Visit the nearest producer first: any path that implies this edge passes through a later producer of the
            # same consumer.
            if before[b] >> a & 1:
                continue
            # Items wait only for counters of their own run. A producer in an earlier run must therefore precede the
            # producers that the item waits for.
            targets = [b]
            if by_item and node_copy[a] == node_copy[b]:
                kept[b].append(a)
            elif by_item:
                targets = [p for p in kept[b] if not before[p] >> a & 1]
            for target in targets:
                _keep(found, (node_group[a], node_group[target]), copies, node_copy[a], node_copy[target])
            for node in {b, *targets}:
                # A LOGIT_ROW consumer waits for rows that differ from step to step, so it orders nothing for other
                # groups. Its entry here is harmless, because it has no successors.
                before[node] |= before[a] | 1 << a
    return found


def _groups(segment: int, number: int, ordinal: int, part: PhaseTasks, d: Dims) -> Iterator[Group]:
    """The groups of a phase's tasks: the real, then the virtual ones, each by row block."""
    touched_by = accesses(part.phase, part.columns, d)
    order = np.argsort(part.block, kind="stable")
    starts = np.flatnonzero(np.diff(part.block[order], prepend=-1))
    touches: list[list[Touch]] = [[] for _ in starts]
    for access in (a for a in touched_by if a.index in (Index.NONE, Index.LOGIT_OWNER)):
        around = hulls(boxes(access)[order], starts)
        ranks = (
            [_ranks(rank, d) for rank in access.rank[order[starts]]] if isinstance(access.rank, np.ndarray) else None
        )
        one = _ranks(access.rank, d) if ranks is None else ()
        for g in np.flatnonzero(nonempty(around)).tolist():
            at = one if ranks is None else ranks[g]
            touches[g].append(Touch(access.buffer, at, access.kind is not Kind.READ, tuple(around[g].tolist())))
    blocks = part.block[order[starts]].tolist()
    for block, members, touched in zip(blocks, np.split(order, starts[1:]), touches, strict=True):
        if touched:
            yield Group(segment, number, ordinal, d.rank, block, Index.NONE, members, tuple(touched))
    for index in (Index.ITEM, Index.LOGIT_ROW):
        picked = [a for a in touched_by if a.index is index]
        for block in range(d.row_blocks) if picked else ():
            owner = d.owner(block * d.row_block)
            if index is Index.LOGIT_ROW and not d.replicated_residual and owner != d.rank:
                continue
            parts = tuple(
                Touch(
                    access.buffer,
                    (owner,) if access.rank is None else _ranks(access.rank, d),
                    access.kind is not Kind.READ,
                    # The declared box covers every possible row; this is the part of it in the block.
                    (*block_rows(d, block), int(access.col[0]), int(access.col_end[0])),
                )
                for access in picked
            )
            yield Group(segment, number, ordinal, d.rank, block, index, np.zeros(0, np.int64), parts)


def _ranks(rank: int | Column | None, d: Dims) -> tuple[int, ...]:
    """The ranks that one value of an access's `rank` selects."""
    assert rank is not None
    return tuple(range(d.tp)) if rank == EVERY else (d.rank if rank == OWN else int(rank),)


def _candidates(groups: list[Group], node_group: Sequence[int], node_copy: Sequence[int]) -> Iterator[list[int]]:
    """For each node in order, the earlier nodes whose bounding boxes overlap its own in some buffer, if one of the two
    nodes writes that buffer.
    """
    touched: dict[tuple[Buffer, int, int], list[tuple[int, int, int, int, int, int]]] = defaultdict(list)
    for node, g in enumerate(node_group):
        for t in groups[g].touches:
            layer = node_copy[node] if BUFFERS[t.buffer].layered else 0
            row, row_end, col, col_end = t.box
            for rank in t.ranks:
                touched[t.buffer, layer, rank].append((row, row_end, col, col_end, node, int(t.writes)))
    pairs = [_overlapping(np.array(sorted(rows), dtype=np.int64)) for rows in touched.values()]
    a, b = np.concatenate(pairs, axis=1)
    run = np.array(node_copy) * (1 + max(g.ordinal for g in groups)) + [groups[g].ordinal for g in node_group]
    keep = run[a] < run[b]
    pair = np.unique(b[keep] * len(run) + a[keep])
    producer = (pair % len(run)).tolist()
    ends = np.searchsorted(pair // len(run), np.arange(len(node_group) + 1)).tolist()
    for first, last in itertools.pairwise(ends):
        yield producer[first:last]


def _overlapping(hulls: NDArray[np.int64]) -> NDArray[np.int64]:
    """[2, pairs] of nodes whose boxes overlap, where at least one of the two writes. A box is (row,
    row_end, col, col_end, node, writes), sorted by row.

    Boxes cover few rows, so all boxes that may overlap a given box lie in a short range of the sorted boxes.
    """
    row, row_end, col, col_end, node, writes = hulls.T
    first = np.searchsorted(row, row - (row_end - row).max(), side="right")
    count = np.searchsorted(row, row_end) - first
    i = np.repeat(np.arange(len(row)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    meet = (row[i] < row_end[j]) & (col[i] < col_end[j]) & (col[j] < col_end[i]) & ((writes[i] | writes[j]) != 0)
    return np.stack([node[i[meet]], node[j[meet]]])


def _keep(found: Dependencies, edge: Edge, copies: list[int], first: int, second: int) -> None:
    if first == second:
        found.within.add(edge)
    elif second != first + 1:
        raise AssertionError(f"tasks of segment {copies[first]} must precede tasks that are not in the next run")
    elif copies[first] == PROLOGUE:
        found.entering.add(edge)
    else:
        found.onward.add(edge)
