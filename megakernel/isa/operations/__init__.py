"""All operations, one file each. A file declares which data the operation's instructions access, what they cost, how
the scheduler divides a phase into instructions, and which buffers a phase needs. A function in NumPy executes an
instruction; its results are the reference for all backends."""

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
    """The buffer regions that instructions of `phase` with operands `columns` read and write on rank `dims.rank`."""
    return OPERATIONS[phase.operation].accesses(phase, columns, dims)


def cost(phase: Phase, columns: Columns, dims: Dims) -> Cost:
    """Return the FLOPs and bytes of the instructions of `phase` with operands `columns` on rank `dims.rank`."""
    return OPERATIONS[phase.operation].cost(phase, columns, dims)
