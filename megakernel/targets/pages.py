"""Determines how many pages of shared memory each instruction takes, and what the pages contain.

All operands that matmuls and attention load pass through pages, except rows that a matmul normalises. A thread block
has a ring buffer of pages of PAGE_BYTES: PAGE_ROWS rows of ROW_BYTES. Loader warps fill pages, and consumer warps
compute on them. Some outputs are stored through pages, too. Each instruction takes the next pages of the ring, and its
operands determine the contents of each page. So loaders and consumers agree without communicating. The ring must have
as many pages as an instruction holds at once. A TMA copy is a whole page or a box of BOX_ROWS rows. The contents depend
on the kind of instruction:

tensor     Matmuls on tensor cores (`dims.worker.units` is TENSOR). The output columns of all weight matrices, side by
           side, are divided into chunks of CHUNK columns, and the inner dimension into k steps of K_STEP elements. Each
           k step of each chunk takes one page of input rows, then one page for each PAGE_ROWS columns of the chunk.
           These pages are released while the products of the next k step are computed. Output pages follow if the
           output is stored through pages.
dots       Matmuls as dot products (`dims.worker.units` is DOTS). Weight columns and input rows are divided into pieces
           of DOT_PIECE elements, and a page has PIECES pieces. A weight page has one piece of each of PIECES columns.
           Weight pages come in pairs, so that one warp has both columns of a RoPE pair, or a gate column and its up
           column. The ring is filled several times, and each filling is called a lap: first weight pages, then pages
           with all of the instruction's input rows. The input pages are released at the end of the lap, and loaded
           again in the next lap. If the matmul normalises its input rows itself, they take no pages: the consumers keep
           them in NORM_BYTES of shared memory beside the ring.
attention  An attention item has query rows of one sequence and a range of its KV blocks. The rows are divided into
           query tiles, called units. A unit has QUERY_TILE (row, head) pairs that use one KV head, or one of two parts
           of it if heads have more than HEAD_PART elements. The thread block computes UNITS units at a time, in one
           pass over the KV blocks. For each KV block and KV head of a pass, there are K pages, then V pages, each with
           up to 64 elements per token. Items that only pad the list of items take one empty page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, Column, Dims, Dtype, ModelSizes, Phase, Result, Units, ceil_div
from .launch import PAGE_BYTES

ROW_BYTES = 128
PAGE_ROWS = PAGE_BYTES // ROW_BYTES
BOX_ROWS = 32
CHUNK = 256
K_STEP = ROW_BYTES // 2  # bfloat16 elements per row
STEP_PAGES = 1 + CHUNK // PAGE_ROWS  # pages for K_STEP elements of CHUNK weight columns, and of the inputs
STAGES = 2  # an instruction holds at once the pages of two steps of K_STEP elements each
WARPGROUP_ROWS = 64  # rows that one wgmma instruction multiplies
MAPS = 2  # tensor maps per buffer: one for boxes of BOX_ROWS rows, one for whole pages
DOT_PIECE = 1024
# TMA limits a box to 256 elements per dimension. Therefore the tensor map for weights divides a piece of DOT_PIECE
# elements into rows of this many elements.
PIECE_INNER = 256
PIECES = PAGE_BYTES // (2 * DOT_PIECE)  # pieces in a page

# For matmuls as dot products, an SM prefetches weights into L2 while its shared memory has no room for them yet. It
# prefetches at most this many pages of weights. The pages of all SMs then fill half of the 50 MB of L2.
AHEAD_PAGES = 12
DOT_UNIT = 8  # column tiles of matmuls as dot products start at multiples of this number of columns
DOT_INPUT_PAGES = 4  # maximum number of input pages that a matmul as dot products holds in the ring
NORM_BYTES = 16384  # shared memory for input rows that a matmul as dot products normalises itself
UNITS = 8  # query tiles of attention (units) that a thread block computes at the same time
QUERY_TILE = 16  # (query row, query head) pairs of a query tile
HEAD_PART = 128  # the maximum number of a head's elements that a unit computes; a wider head has two units

Ints = NDArray[np.int64]


# The kinds of results that a matmul on tensor cores writes to pages of shared memory, from which TMA stores them. All
# other results are stored directly from registers, by the consumer warps (which compute).
BY_PAGES = (Result.RESIDUAL, Result.PARTIAL, Result.GATED, Result.GELU_GATED, Result.STORED)


def output_columns(phase: Phase, dims: Dims) -> int:
    """Return how many output columns of a matmul fit into a page; 0 if its outputs are not stored through pages."""
    if phase.result not in BY_PAGES or dims.worker.units != Units.TENSOR or phase.output is None:
        return 0
    return ROW_BYTES // BUFFERS[phase.output].resolve_dtype(dims.model).itemsize


@dataclass(frozen=True)
class Pages:
    """The number of shared-memory pages that each instruction takes, by use, and how many it holds at once (`held`)."""

    weights: Ints
    inputs: Ints
    output: Ints
    held: Ints


def matmul_pages(phase: Phase, rows: Column, cols: Column, dims: Dims) -> Pages:
    """Return the pages of matmul instructions whose tiles have `rows` x `cols` outputs."""
    return (_dots if dims.worker.units == Units.DOTS else _tensor)(
        phase, rows.astype(np.int64), cols.astype(np.int64), dims
    )


def _tensor(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> Pages:
    steps = ceil_div(phase.inner(dims.split), K_STEP)
    of_weights = phase.matrices(dims.split) * ceil_div(cols, PAGE_ROWS)
    weights = steps * of_weights
    inputs = steps * ceil_div(phase.matrices(dims.split) * cols, CHUNK)
    per_page = output_columns(phase, dims)
    output = ceil_div(cols, per_page) if per_page else np.zeros_like(cols)
    step = np.minimum(1 + of_weights, STEP_PAGES)
    return Pages(weights, inputs, output, np.minimum(weights + inputs, STAGES * step))


def computed_rows(rows: Ints) -> Ints:
    """Return how many rows an SM's tensor cores compute: a multiple of WARPGROUP_ROWS."""
    return WARPGROUP_ROWS * ceil_div(rows, WARPGROUP_ROWS)


def tile_work(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> tuple[Ints, Ints]:
    """Return the FLOPs that tensor cores execute for each tile, with padding, and the bytes loaded."""
    inner, columns = phase.inner(dims.split), phase.matrices(dims.split) * cols
    computed = computed_rows(rows) * phase.matrices(dims.split) * PAGE_ROWS * ceil_div(cols, PAGE_ROWS)
    loaded = columns + BOX_ROWS * ceil_div(rows, BOX_ROWS) * ceil_div(columns, CHUNK)
    return 2 * inner * computed, Dtype(dims.model.dtype).itemsize * inner * loaded


def _dots(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> Pages:
    weights = 2 * ceil_div(phase.inner(dims.split), DOT_PIECE) * ceil_div(phase.matrices(dims.split) * cols, 2 * PIECES)
    inputs = dot_input_pages(phase, rows, dims)
    lap = np.maximum(dims.worker.ring_pages - inputs, 2) // 2 * 2  # even, because pages are used in pairs
    return Pages(weights, inputs * -(-weights // lap), np.zeros_like(cols), inputs + np.minimum(weights, lap))


def dot_input_pages(phase: Phase, rows: Ints, dims: Dims) -> Ints:
    """Return the number of input pages that a matmul as dot products holds; 0 if it normalises its inputs itself."""
    return ceil_div(rows * ceil_div(phase.inner(dims.split), DOT_PIECE), PIECES) * (phase.norm is None)


def ahead_columns(phase: Phase, dims: Dims) -> int:
    """Return how many weight columns of a matmul as dot products are prefetched into the L2 cache.

    The columns fill whole pairs of shared-memory pages. The number is 0 if one copy cannot load a whole page.
    """
    if phase.inner(dims.split) % PIECE_INNER:
        return 0
    return AHEAD_PAGES // (2 * -(-phase.inner(dims.split) // DOT_PIECE)) * 2 * PIECES


def norm_fits(rows: int, inner: int, dims: Dims) -> bool:
    """Whether a matmul can normalise this many input rows itself, so that no separate norm is needed."""
    if dims.worker.units == Units.DOTS:
        return rows * inner * Dtype(dims.model.dtype).itemsize <= NORM_BYTES
    return dims.worker.units == Units.CORE


def chunk_output_pages(phase: Phase, dims: Dims) -> int:
    """Return the number of output pages for a whole chunk of columns; 0 if outputs are not stored through pages."""
    per_page = output_columns(phase, dims)
    return -(-CHUNK // (phase.matrices(dims.split) * per_page)) if per_page else 0


def kv_pages(dims: Dims) -> int:
    """Return the number of K and V pages for one KV head and one KV block. Attention holds all of them at once."""
    return 2 * -(-dims.model.head_dim // K_STEP)


def head_units(rows: Column, dims: Dims) -> Ints:
    """Return how many units process these numbers of query rows of an item, for each KV head."""
    return ceil_div(rows.astype(np.int64) * dims.model.group_size, QUERY_TILE) * head_parts(dims.model)


def head_parts(model: ModelSizes) -> int:
    """Return into how many parts heads are divided, of each of which a unit computes the results."""
    return -(-model.head_dim // HEAD_PART)


def attention_pages(item_rows: Column, item_kv_heads: Column, item_blocks: Column, dims: Dims) -> Ints:
    """Return the number of shared-memory pages that each attention item takes. Padding items have no KV blocks."""
    of_head = head_units(item_rows, dims)
    units = of_head * item_kv_heads
    # A thread block computes UNITS units in one pass over an item's KV blocks. Each pass loads all KV heads that its
    # units use. If two passes use the same KV head, it is loaded twice.
    heads = [
        np.where(first < units, (np.minimum(first + UNITS, units) - 1) // of_head - first // of_head + 1, 0)
        for first in range(0, int(units.max(initial=0)), UNITS)
    ]
    taken: Ints = np.sum(heads, axis=0, dtype=np.int64) * item_blocks * kv_pages(dims)
    return np.where(item_blocks == 0, 1, taken)


def dot_rows(inner: int) -> int:
    """The maximum number of rows of a matmul as dot products whose input rows have at most `inner` (> 0) elements."""
    return DOT_INPUT_PAGES * PIECES // -(-inner // DOT_PIECE)
