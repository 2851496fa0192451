"""The tensor maps of a program. They describe buffers to TMA, the GPU's engine that copies boxes of their elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...isa import BUFFERS, Buffer, Dims, Forward, Operation, Phase, Result, Units
from ...targets.pages import BOX_ROWS, DOT_PIECE, MAPS, PAGE_ROWS, PIECE_INNER, PIECES, ROW_BYTES, output_columns

PARTS, PAGES = range(MAPS)  # a buffer may have two maps: one for boxes of BOX_ROWS rows, and one for whole pages


@dataclass(frozen=True)
class MapLayout:
    """A tensor map without its address. It describes a tensor, and the box of elements that one TMA copy moves.

    `sizes` is the tensor's size and `box` the box's size, in elements. `strides` are in bytes. The innermost dimension
    comes first, and has no stride. If `swizzled`, a box has TMA's 128-byte swizzle in shared memory.
    """

    item: int  # bytes of an element
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True


def map_layouts(forward: Forward, dims: Dims, pages: int) -> dict[tuple[Buffer, int], MapLayout]:
    """Return the layouts of rank `dims.rank`'s tensor maps, by (buffer, PARTS) or (buffer, PAGES)."""
    found = {}

    def add(kinds: tuple[int, ...], buffer: Buffer | None, per_layer: int = 1) -> None:
        if buffer is not None:
            for kind in kinds:
                found[buffer, kind] = _tiles(buffer, per_layer, (BOX_ROWS, PAGE_ROWS)[kind], dims, pages)

    loaded, stored = (PARTS, PAGES), (PARTS,)
    for phase in forward:
        if phase.operation is Operation.ATTENTION:
            add(loaded, Buffer.K_CACHE)
            add(loaded, Buffer.V_CACHE)
        if phase.is_matmul and dims.worker.units == Units.TENSOR:
            add(loaded, phase.weights, phase.matrices(dims.split))
            add(loaded, phase.inputs)
            if output_columns(phase, dims):
                add(stored, phase.output, dims.split.tp if phase.result is Result.PARTIAL else 1)  # one part per rank
        dots = phase.operation is Operation.EXPERTS or (phase.is_matmul and dims.worker.units == Units.DOTS)
        if dots and phase.inner(dims.split) % PIECE_INNER == 0:
            assert phase.weights is not None
            found[phase.weights, PAGES] = _columns(phase, phase.weights, dims)
    return {key: layout for key, layout in found.items() if math.prod(layout.sizes)}


def map_bits(forward: Forward, dims: Dims) -> tuple[int, int]:
    """Return two bit masks, in which bit b stands for buffer b: the buffers that have tensor maps, and those of them
    into which instructions of other ranks also store."""
    partial = {phase.output for phase in forward if phase.is_matmul and phase.result is Result.PARTIAL}
    used = {buffer for d in dims.ranks for buffer, _ in map_layouts(forward, d, 1)}
    own, everywhere = (sum(1 << buffer for buffer in buffers) for buffers in (used, used & partial))
    return own, everywhere


def _tiles(buffer: Buffer, per_layer: int, rows_of_box: int, dims: Dims, pages: int) -> MapLayout:
    """Return the map for tiles of a buffer with `per_layer` matrices in each layer. A box has `rows_of_box` rows."""
    spec = BUFFERS[buffer]
    shape, item = spec.shape(dims, pages), spec.resolve_dtype(dims.model).itemsize
    rows, columns = math.prod(shape[:-1]) // per_layer, shape[-1]
    sizes = columns, rows, len(spec.layers(dims.model)) * per_layer
    return MapLayout(item, sizes, (columns * item, rows * columns * item), (ROW_BYTES // item, rows_of_box, 1))


def _columns(phase: Phase, weights: Buffer, dims: Dims) -> MapLayout:
    """Return the map for the weights of a matmul that is computed as dot products. One box fills one page of shared
    memory.

    A box has DOT_PIECE elements from each of PIECES columns. If the phase has two weight matrices, a box takes
    consecutive columns of one matrix. Otherwise, it takes every other column, because pages come in pairs. TMA limits a
    box to 256 elements per dimension, so the map divides a column into rows of PIECE_INNER elements.
    """
    item = BUFFERS[weights].resolve_dtype(dims.model).itemsize
    inner, width = phase.inner(dims.split), phase.width(dims.split)
    row, two = inner * item, phase.matrices(dims.split) == 2
    members, whole = ((width, 2), 2 * width * row) if two else ((2, width // 2), width * row)
    experts = dims.split.rank_experts if phase.operation is Operation.EXPERTS else 1
    return MapLayout(
        item,
        sizes=(PIECE_INNER, inner // PIECE_INNER, *members, len(BUFFERS[weights].layers(dims.model)) * experts),
        strides=(PIECE_INNER * item, row, row * members[0], whole),
        box=(PIECE_INNER, DOT_PIECE // PIECE_INNER, *((PIECES, 1) if two else (1, PIECES)), 1),
        swizzled=False,
    )
