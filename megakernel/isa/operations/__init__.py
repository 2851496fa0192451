"""All operations. Each file here declares one: the regions of buffers that its instructions access, their cost, how the
scheduler divides a phase, which buffers a phase names, and what an instruction computes, in NumPy.
"""

from __future__ import annotations

from importlib import import_module

from ..access import Access, Columns
from ..dims import Dims
from ..opcodes import Operation
from ..phases import Phase
from .spec import Cost, OperationSpec

OPERATIONS: dict[Operation, OperationSpec] = {
    operation: getattr(import_module(f"{__name__}.{operation.name.lower()}"), operation.name) for operation in Operation
}


def accesses(phase: Phase, columns: Columns, dims: Dims) -> list[Access]:
    """Return the regions of buffers that instructions of `phase` with operands `columns` access on rank `dims.rank`."""
    return OPERATIONS[phase.operation].accesses(phase, columns, dims)


def cost(phase: Phase, columns: Columns, dims: Dims) -> Cost:
    """Return the work of the instructions of `phase` on rank `dims.rank`. `columns` has their operands."""
    return OPERATIONS[phase.operation].cost(phase, columns, dims)
