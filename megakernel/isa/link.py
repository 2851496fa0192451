"""Counts the bytes that instructions store on other ranks, from the buffer regions that they declare to write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .access import EVERY, OWN, Access, Columns, Index, Kind
from .buffers import BUFFERS
from .dims import Dims
from .operations import accesses
from .phases import Phase

Bytes = NDArray[np.int64]


def link_bytes(phase: Phase, columns: Columns, dims: Dims) -> Bytes:
    """Return how many bytes a rank's instructions store on each other rank, as an array [tp]. The instructions are
    those of `phase` on rank `dims.rank`, with the operands `columns`. The rank's own entry is 0.

    For attention, `columns` must contain all instructions of the rank in a layer, because only their total is known:
    the step table divides the work among them. All rows of the final norm count as sent by rank 0. In fact the step
    table chooses the sender, but the total of all ranks is the same.
    """
    total: Bytes = link_bytes_each(phase, columns, dims).sum(axis=0)
    return total


def link_bytes_each(phase: Phase, columns: Columns, dims: Dims) -> Bytes:
    """Return the bytes that each of n instructions of rank `dims.rank` stores on each rank, as an array [n, tp]. The
    entries for rank `dims.rank` itself are 0.

    Attention instructions of a layer count with equal parts of the total, because the step table divides their work.
    """
    count = len(next(iter(columns.values()), ()))
    out = np.zeros((count, dims.split.tp), dtype=np.int64)
    for access in accesses(phase, columns, dims):
        if access.kind is not Kind.READ and count:
            out += _stored(access, dims)
    out[:, dims.split.rank] = 0
    return out


def _stored(access: Access, d: Dims) -> Bytes:
    """Return the bytes that one declared access of n instructions stores in each rank's copy of the buffer: [n, tp]."""
    rows = np.maximum(access.row_end - access.row, 0).astype(np.int64)
    cols = np.maximum(access.col_end - access.col, 0)
    size = rows * cols * BUFFERS[access.buffer].resolve_dtype(d.model).itemsize
    out = np.zeros((len(size), d.split.tp), dtype=np.int64)
    if access.index is Index.LOGIT_OWNER and d.split.rank > 0:
        return out
    if access.rank is None:
        first = d.bucket.row_block * np.arange(d.bucket.row_blocks)
        owned = np.zeros(d.split.tp, dtype=np.int64)
        np.add.at(owned, d.owner(first), np.minimum(d.bucket.row_block, d.bucket.tokens - first))
        # `size[0]` is the size of all token rows. Each row is stored once, in the copy of the rank that owns the row.
        out[:] = owned * int(size[0] // d.bucket.tokens)
    elif isinstance(access.rank, np.ndarray):
        out[np.arange(len(size)), access.rank] = size
    elif access.rank == EVERY:
        out[:] = size[:, None]
    elif access.rank != OWN:
        out[:, access.rank] = size
    if access.index is Index.ITEM:
        whole, n = out[0], len(size)
        out = whole // n + (np.arange(n)[:, None] < whole % n)
    return out
