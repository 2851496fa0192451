"""Shared by all backends: allocates buffers, writes the token history, refuses programs that do not fit."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dims, StepTable
from ..program import Program, check

# The sizes that may differ between a backend's programs. All others depend on the model or on the engine's limits.
_BUCKET = {
    "row_block", "tokens", "logit_rows", "items", "attention_slots", "partials", "bias_entries", "mask_rows",
    "replicated_residual", "ring_pages",
}  # fmt: skip


def allocate(buffer: Buffer, dims: Dims, pages: int) -> NDArray[np.generic]:
    """Return an array of zeros for a buffer, in its dtype (bfloat16 as uint16). If layered, axis 0 is the layer."""
    spec = BUFFERS[buffer]
    layers = (dims.model.layers,) if spec.layered else ()
    return np.zeros(layers + spec.shape(dims, pages), dtype=spec.resolve_dtype(dims.model).numpy)


@lru_cache(maxsize=1024)
def holds_whole(buffer: Buffer, dims: Dims) -> bool:
    """Whether rank `dims.rank`'s part of a weight buffer is the whole buffer. Ranks can then share one copy."""
    shape = BUFFERS[buffer].shape
    return shape(dims, 0) == shape(dims.changed(tp=1, rank=0), 0)


def write_history(history: NDArray[np.int32], slot: int, start: int, tokens: NDArray[np.int32]) -> None:
    """Store tokens in `history`, at [slot, start : start + len(tokens)]. Raises MegakernelError if they do not fit."""
    check_history(history.shape, slot, start, len(tokens))
    history[slot, start : start + len(tokens)] = tokens


def check_history(shape: tuple[int, ...], slot: int, start: int, count: int) -> None:
    """Raise MegakernelError if HISTORY [slots, tokens] has no room for `count` tokens of `slot` at `start`."""
    if not (0 <= slot < shape[0] and 0 <= start <= shape[1] - count):
        raise MegakernelError(
            f"the token history has no room for {count} tokens at position {start} of slot {slot}: it has slots 0 to "
            f"{shape[0] - 1}, with room for {shape[1]} tokens each"
        )


def check_program(dims: Dims, program: Program) -> None:
    """Raise MegakernelError if `program` does not fit a backend with the sizes `dims`, or violates a rule of
    megakernel/program/checks.py. Native code relies on this check."""
    if program.ranks != dims.split.tp:
        raise MegakernelError(
            f"the program was compiled for {program.ranks} ranks, but the backend has {dims.split.tp}: "
            f"compile it with --tp {dims.split.tp}"
        )
    own = dims.flat
    for name, value in program.dims.flat.items():
        if name not in _BUCKET and value != own[name]:
            raise MegakernelError(
                f"the program was compiled for {name} = {value}, but the backend has {own[name]}: "
                "compile it again, for the backend's model and limits"
            )
    check(program, whole=False)


def check_table(program: Program, table: StepTable, pages: int) -> None:
    """Raise MegakernelError unless `table` was made for `program` and a KV cache of `pages` pages."""
    if table.dims is not program.dims and table.dims != program.dims:
        raise MegakernelError("the step table was made for another program: make one for the program that is to run")
    if np.maximum.reduce(table.block_tables.view(np.uint32), axis=None) >= pages:  # a negative number is a large one
        raise MegakernelError(f"the step table names a KV page outside the pool, which has pages 0 to {pages - 1}")
