"""Boxes of rows and columns, many at a time, and the parts of a box that attention items pick."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..isa import Access, Dims, item_columns

Boxes = NDArray[np.int32]  # [n, 4]: row, row_end, col, col_end


def boxes(access: Access) -> Boxes:
    """One box per instruction; empty where the instruction does not touch the buffer."""
    return np.stack([access.row, access.row_end, access.col, access.col_end], axis=1)


def nonempty(b: Boxes) -> NDArray[np.bool_]:
    """[n]: which boxes hold an element."""
    found: NDArray[np.bool_] = (b[:, 0] < b[:, 1]) & (b[:, 2] < b[:, 3])
    return found


def overlap(a: Boxes, b: Boxes) -> NDArray[np.bool_]:
    """[len(a), len(b)]: which boxes share an element. All must be nonempty."""
    x, y = a[:, None, :], b[None, :, :]
    rows = (x[..., 0] < y[..., 1]) & (y[..., 0] < x[..., 1])
    cols = (x[..., 2] < y[..., 3]) & (y[..., 2] < x[..., 3])
    return rows & cols


def block_rows(dims: Dims, block: int) -> tuple[int, int]:
    """Token rows of a row block."""
    return block * dims.row_block, min((block + 1) * dims.row_block, dims.tokens)


def head_group_boxes(access: Access, dims: Dims, block: int, group_heads: int) -> Boxes:
    """What attention items of `block` touch, one box per group of `group_heads` of the rank's KV heads."""
    low, high = block_rows(dims, block)
    heads = dims.rank_kv_heads
    spans = [
        item_columns(access.buffer, dims, first, min(first + group_heads, heads))
        for first in range(0, heads, group_heads)
    ]
    return np.array([(low, high, *span) for span in spans], dtype=np.int32)


def block_box(access: Access, dims: Dims, block: int) -> Boxes:
    """The part of a token-row access, whose box is every row it may be, that lies in one row block."""
    low, high = block_rows(dims, block)
    return np.array([[low, high, access.col[0], access.col_end[0]]], dtype=np.int32)
