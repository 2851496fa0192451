"""Counts the bytes that instructions load, from memory or from the last-level cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .access import Columns, Index, Kind
from .buffers import BUFFERS
from .dims import Dims
from .opcodes import Operation
from .operations import accesses, cost
from .operations.matmul import weight_bytes
from .phases import Phase

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Loads:
    """The bytes that each instruction loads. `weights` may be loaded before the instruction's waits end, because they
    do not depend on other instructions. The inputs, `read`, are loaded afterwards. `regions` has the bytes of the
    regions of buffers that each instruction declares to read, each counted once, even if it is loaded several times."""

    weights: Floats
    read: Floats
    regions: Floats

    @property
    def all(self) -> Floats:
        return self.weights + self.read


def loads(phase: Phase, columns: Columns, dims: Dims) -> Loads:
    """Return the bytes that instructions with operands `columns` load on rank `dims.rank`. For attention, the result is
    0, because the step table determines its loads."""
    if phase.operation is Operation.ATTENTION:
        none = np.zeros(len(next(iter(columns.values()))))
        return Loads(none, none, none)
    read = _region_reads(phase, columns, dims)
    if not phase.is_matmul:
        return Loads(cost(phase, columns, dims).memory_bytes, read, read)
    return Loads(weight_bytes(phase, columns["cols"], dims), read, read)


def _region_reads(phase: Phase, columns: Columns, dims: Dims) -> Floats:
    read = np.zeros(len(next(iter(columns.values()))))
    for access in accesses(phase, columns, dims):
        if access.kind is Kind.WRITE:
            continue
        high = columns["rows"] if access.index is Index.LOGIT_ROW else np.maximum(access.row_end - access.row, 0)
        wide = np.maximum(access.col_end - access.col, 0).astype(np.float64)
        read += wide * BUFFERS[access.buffer].resolve_dtype(dims.model).itemsize * high * access.share
    return read
