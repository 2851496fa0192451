"""Counts the bytes that instructions load (from memory or the last-level cache), and the bytes that they store on other
ranks. The counts are derived from the buffer regions that instructions declare to read and write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .access import Access, Columns, Index, Kind, by_rank
from .buffers import BUFFERS
from .dims import Dims
from .opcodes import Operation
from .operations import accesses, cost
from .operations.matmul import weight_bytes
from .phases import Phase

Bytes = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Loads:
    """The bytes that each instruction loads. `weights` may be loaded before the instruction's waits end, because they
    do not depend on other instructions. The inputs, `read`, are loaded afterwards. `regions` has the bytes of the
    buffer regions that an instruction declares to read. Each region counts once, even if it is loaded several times."""

    weights: Floats
    read: Floats
    regions: Floats


def loads(phase: Phase, columns: Columns, dims: Dims) -> Loads:
    """Return the bytes that instructions with operands `columns` load on rank `dims.rank`. For attention, the result is
    0, because the step table determines its loads."""
    if phase.operation is Operation.ATTENTION:
        none = np.zeros(len(next(iter(columns.values()))))
        return Loads(none, none, none)
    read = np.zeros(len(columns["row"]))
    for access in accesses(phase, columns, dims):
        if access.kind is not Kind.WRITE:
            read += access.size(columns["rows"], dims)
    if not phase.is_matmul:
        return Loads(cost(phase, columns, dims).memory_bytes, read, read)
    return Loads(weight_bytes(phase, columns["cols"], dims), read, read)


def link_bytes(phase: Phase, columns: Columns, dims: Dims) -> Bytes:
    """Return the bytes that each of n instructions of rank `dims.rank` stores on each rank, as an array [n, tp]. The
    entries for rank `dims.rank` itself are 0.

    For attention, `columns` must contain all instructions of the rank in a layer. The step table divides the work among
    them, so only their total is known, of which each counts as an equal fraction. All rows of the final norm count as
    sent by rank 0. In fact the step table chooses the sender, but the total of all ranks is the same.
    """
    count = len(next(iter(columns.values()), ()))
    out = np.zeros((count, dims.split.tp), dtype=np.int64)
    for access in accesses(phase, columns, dims):
        if access.kind is not Kind.READ and count:
            out += _stored(access, dims)
    out[:, dims.split.rank] = 0
    return out


def _stored(access: Access, d: Dims) -> Bytes:
    """Return how many bytes each of n instructions stores in each rank's copy of a buffer: [n, tp]."""
    rows = np.maximum(access.row_end - access.row, 0).astype(np.int64)
    cols = np.maximum(access.col_end - access.col, 0)
    size = rows * cols * BUFFERS[access.buffer].resolve_dtype(d.model).itemsize
    out = np.zeros((len(size), d.split.tp), dtype=np.int64)
    if access.index is Index.LOGIT_OWNER and d.split.rank > 0:
        return out
    if access.rank is None:
        first, end = d.block_rows(np.arange(d.bucket.row_blocks))
        owned = np.zeros(d.split.tp, dtype=np.int64)
        np.add.at(owned, d.owner(first), end - first)
        # `size[0]` is the size of all token rows. Each row is stored once, in the copy of the row's owner.
        out[:] = owned * int(size[0] // d.bucket.tokens)
    else:
        out = by_rank(access.rank, size, d.split.rank, d.split.tp)
    if access.index is Index.ITEM:
        whole, n = out[0], len(size)
        out = whole // n + (np.arange(n)[:, None] < whole % n)
    return out
