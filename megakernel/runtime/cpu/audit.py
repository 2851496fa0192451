"""Checks that a rank stored on other ranks only what its instructions declare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import BUFFERS, Buffer, Dims, Operation, Phase, StepTable, accesses
from ...isa.access import EVERY, Access, Index, Kind, item_columns
from ...isa.record import Records, phase_number
from ...program import SEGMENTS, Program

# A store on another rank, as the native library lists it: `mk::RemoteStore` of csrc/cpu/audit.h. `segment` is an index
# of SEGMENTS; `number` is the row in `Program.numbered`.
STORE = np.dtype(
    [("address", "u8"), ("bytes", "i8"), ("segment", "i4"), ("layer", "i4"), ("number", "i4"), ("rank", "i4")]
)


@dataclass(frozen=True)
class Target:
    """Elements [first, first + count) of `rank`'s copy of `buffer`."""

    buffer: Buffer
    rank: int
    first: int
    count: int


@dataclass(frozen=True)
class _Box:
    row: int
    row_end: int
    col: int
    col_end: int


def audit(program: Program, table: StepTable, stores: NDArray[Any], locate: Callable[[int, int], Target]) -> None:
    """Raise MegakernelError that names the first of `stores` (STORE) that its instruction does not declare.

    `locate(address, size)` finds the elements in the `size` bytes at `address`.
    """
    records = [program.numbered(segment)[0] for segment in range(len(SEGMENTS))]
    for address, size, segment, layer, number, rank in stores.tolist():
        record = records[segment][number]
        phase = program.forward.by_number[int(phase_number(record))]
        target, own = locate(address, size), table.rank(rank)
        for box in _boxes(target, own.dims):
            if not _declared(phase, record, box, target, own):
                raise MegakernelError(
                    f"rank {rank}: {phase.name} ({SEGMENTS[segment]} record {number}, layer {layer}) stored"
                    f" rows {box.row}..{box.row_end - 1}, columns {box.col}..{box.col_end - 1} of"
                    f" {target.buffer.name} at rank {target.rank}, which it does not declare"
                )


def _boxes(target: Target, dims: Dims) -> Iterator[_Box]:
    """Divide consecutive elements into boxes, one for each row or part of a row."""
    width = math.prod(BUFFERS[target.buffer].shape(dims, 0)[1:])
    start, end = target.first, target.first + target.count
    while start < end:
        row, col = divmod(start, width)
        count = min(width - col, end - start)
        yield _Box(row, row + 1, col, col + count)
        start += count


def _declared(phase: Phase, record: Records, box: _Box, target: Target, own: StepTable) -> bool:
    columns = phase.columns(record[None])
    if target.buffer is Buffer.HISTORY:  # state that outlives a launch has no declared regions
        if phase.operation is not Operation.SAMPLE:
            return False
        rows = slice(columns["row"][0], columns["row"][0] + columns["rows"][0])
        cells = zip(own.sample_slot[rows].tolist(), own.sample_position[rows].tolist(), strict=True)
        return (box.row, box.col) in cells and box.col_end == box.col + 1
    return any(
        access.buffer is target.buffer
        and access.kind is not Kind.READ
        and _contains(access, box)
        and _at_rank(access, box, target.rank, own.dims)
        and _picked(access, columns, box, own)
        for access in accesses(phase, columns, own.dims)
    )


def _contains(access: Access, box: _Box) -> bool:
    rows = access.row[0] <= box.row and box.row_end <= access.row_end[0]
    return bool(rows and access.col[0] <= box.col and box.col_end <= access.col_end[0])


def _at_rank(access: Access, box: _Box, rank: int, dims: Dims) -> bool:
    """Whether the declared access touches the copy of `rank`."""
    if access.rank is None:
        return dims.owner(box.row) == rank
    if isinstance(access.rank, int):
        return access.rank in (EVERY, rank)
    return bool(access.rank[0] == rank)


def _picked(access: Access, columns: dict[str, NDArray[np.int32]], box: _Box, own: StepTable) -> bool:
    """Whether the access, as the step table resolves it, covers this box. True if the access does
    not depend on the table.
    """
    dims = own.dims
    if access.index is Index.ITEM:
        slot = int(columns["slot"][0])
        for item in range(int(own.slot_items[slot]), int(own.slot_items[slot + 1])):
            row, head = int(own.item_row[item]), int(own.item_kv_head[item])
            first, end = item_columns(access.buffer, dims, head, head + int(own.item_kv_heads[item]))
            if row <= box.row < row + own.item_rows[item] and first <= box.col and box.col_end <= end:
                return True
        return False
    if access.index is Index.LOGIT_OWNER:
        row = int(own.logit_rows[box.row])
        return (dims.owner(row) if row >= 0 else 0) == dims.rank
    return True
