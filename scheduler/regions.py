"""Functions on boxes (ranges of rows and columns) and on groups of KV heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Access, Columns, Dims, Index, Kind, Phase, accesses, item_columns

Boxes = NDArray[np.int32]  # [n, 4]: row, row_end, col, col_end


def boxes(access: Access) -> Boxes:
    """Return for each instruction the rectangle of a buffer that it touches, or an empty one if it touches nothing."""
    return np.stack([access.row, access.row_end, access.col, access.col_end], axis=1)


def nonempty(b: Boxes) -> NDArray[np.bool_]:
    """Return a mask of the boxes that are not empty: [n]."""
    found: NDArray[np.bool_] = (b[:, 0] < b[:, 1]) & (b[:, 2] < b[:, 3])
    return found


def hulls(b: Boxes, starts: NDArray[np.int64]) -> Boxes:
    """Divide the rectangles `b` into groups of consecutive ones, and return the smallest rectangle around each group:
    [len(starts), 4]. `starts` has the first index of each group. Empty rectangles are ignored."""
    none = np.iinfo(np.int32).max
    filled = np.where(nonempty(b)[:, None], b, np.array([none, -1, none, -1], dtype=np.int32))
    low = np.minimum.reduceat(filled[:, ::2], starts)
    high = np.maximum.reduceat(filled[:, 1::2], starts)
    return np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], axis=1)


def head_groups(producer: Phase, columns: Columns, attention: Phase, dims: Dims, group_heads: int) -> NDArray[np.bool_]:
    """Return a mask [tasks, head groups]: whether attention on a head group (`group_heads` consecutive KV heads) may
    read what a task of `producer` writes. Only columns are compared, as if both phases had the same rows."""
    one = {name: np.zeros(1, dtype=np.int32) for name in attention.operands}
    found = accesses(attention, one, dims)
    read = {a.buffer for a in found if a.index is Index.ITEM and a.kind is Kind.READ}
    heads = dims.split.rank_kv_heads
    groups = [(first, min(first + group_heads, heads)) for first in range(0, heads, group_heads)]
    out = np.zeros((len(next(iter(columns.values()))), len(groups)), dtype=bool)
    for access in accesses(producer, columns, dims):
        if access.buffer in read and access.kind is not Kind.READ:
            low, high = np.array([item_columns(access.buffer, dims, *group) for group in groups]).T
            out |= nonempty(boxes(access))[:, None] & (access.col[:, None] < high) & (low < access.col_end[:, None])
    return out
