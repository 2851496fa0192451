"""The bytes that a phase's instructions load, from memory or from the last-level cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .access import Columns, Index, Kind
from .buffers import BUFFERS, itemsize
from .dims import Dims, Units
from .opcodes import Operation
from .operations import accesses, cost
from .operations.matmul import weight_bytes
from .pages import dot_input_pages, matmul_pages, tile_work
from .phases import Phase

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Loads:
    """The bytes that each instruction loads: its `weights`, which it may load before its waits end,
    and its inputs (`read`), which it loads after its waits have ended.
    """

    weights: Floats
    read: Floats

    @property
    def all(self) -> Floats:
        return self.weights + self.read


def loads(phase: Phase, columns: Columns, dims: Dims) -> Loads:
    """Return the loads of instructions on rank `dims.rank`. The loads of attention instructions depend on the step
    table; this function returns 0 for them.
    """
    if phase.operation is Operation.ATTENTION:
        none = np.zeros(len(next(iter(columns.values()))))
        return Loads(none, none)
    if not phase.is_matmul:
        return Loads(cost(phase, columns, dims).memory_bytes, region_reads(phase, columns, dims))
    read = region_reads(phase, columns, dims)
    if dims.ring_pages and phase.norm is None:
        read = _through_the_ring(phase, columns, dims)
    return Loads(weight_bytes(phase, columns["cols"], dims), read)


def region_reads(phase: Phase, columns: Columns, dims: Dims) -> Floats:
    """Return the bytes of the regions that each instruction reads. Each region is counted once."""
    read = np.zeros(len(next(iter(columns.values()))))
    for access in accesses(phase, columns, dims):
        if access.kind is Kind.WRITE:
            continue
        high = columns["rows"] if access.index is Index.LOGIT_ROW else np.maximum(access.row_end - access.row, 0)
        wide = np.maximum(access.col_end - access.col, 0).astype(np.float64)
        read += wide * BUFFERS[access.buffer].resolve_dtype(dims).itemsize * high
    return read


def _through_the_ring(phase: Phase, columns: Columns, dims: Dims) -> Floats:
    """Return the bytes of inputs that each matmul instruction loads through its ring of
    shared-memory pages. Matmuls as dot products load all inputs again in each lap, which is one
    filling of the ring. Matmuls on tensor cores load them again for each chunk of the tile's
    columns.
    """
    rows, cols = columns["rows"].astype(np.int64), columns["cols"].astype(np.int64)
    if dims.units == Units.DOTS:
        pages = matmul_pages(phase, columns["rows"], columns["cols"], dims).inputs
        laps = pages // np.maximum(dot_input_pages(phase, rows, dims), 1)
        return (laps * rows * (phase.inner(dims) * itemsize(dims))).astype(np.float64)
    weights = phase.inner(dims) * phase.matrices(dims) * cols * itemsize(dims)
    return (tile_work(phase, rows, cols, dims)[1] - weights).astype(np.float64)
