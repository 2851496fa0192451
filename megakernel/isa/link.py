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
    """Return the bytes that the instructions of rank `dims.rank` with operands `columns` store on each rank, as an
    array [tp]. The rank's own entry is 0.

    For attention, `columns` must have all of the rank's instructions in a layer, because the step table divides the
    work among them. The final norm counts as if rank 0 sent all rows. In fact, the step table decides which rank
    sends a row, but this does not change the total.
    """
    total: Bytes = link_bytes_each(phase, columns, dims).sum(axis=0)
    return total


def link_bytes_each(phase: Phase, columns: Columns, dims: Dims) -> Bytes:
    """Return the bytes that each of n instructions stores on each rank, as an array [n, tp]. The entries of the
    instructions' own rank, `dims.rank`, are 0.

    The step table divides a layer's attention among the attention instructions. Here, each counts with an equal part.
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
