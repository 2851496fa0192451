"""Pages of shared memory: which pages an instruction takes, who fills them, and who releases them.

Each thread block has one ring of pages. Through it pass all operands that the CUDA interpreter
loads for matmuls and attention, and the outputs that it stores by tiles. An instruction takes a run
of pages, in an order that its operands determine, and the next instruction continues with the next
page of the ring. An instruction can finish only if the ring has at least as many pages as the
instruction holds at once. A page has PAGE_BYTES: PAGE_ROWS rows of ROW_BYTES. It is loaded and
stored in boxes of BOX_ROWS rows.

tensor  Matmuls on tensor cores (`dims.units` is TENSOR). The output columns of all matrices, side
        by side, are divided into chunks of CHUNK, and the inner length into k steps of K_STEP. For
        each chunk and k step, there is a page with the instruction's rows, then a page for each
        PAGE_ROWS columns of the chunk. The pages of a k step are released when the products of the
        next k step are under way. If the output is stored through pages, output pages follow. With
        two SMs (`dims.sms`), each has its own ring and takes these pages for its part of the rows:
        the first SM for `first_rows`, the second for the rest.
dots    Matmuls as dot products (`dims.units` is DOTS). The pages come in laps of at most
        `dims.ring_pages`. A lap has weight pages first, then all of the instruction's rows. A
        weight page has DOT_PIECE elements of PIECES columns. Weight pages come in pairs, so that
        one warp has both columns of a RoPE pair, or a gate and its up column. The rows lie in
        pieces of DOT_PIECE elements, PIECES per page, and are released at the end of their lap.
        Rows that the matmul normalises itself take no pages: the consumers keep them in NORM_BYTES
        of shared memory beside the ring.
attention  A unit is a query tile of QUERY_TILE (row, head) pairs that use one KV head. An item
        makes passes, each over UNITS units. For each pass, KV block and KV head of the pass, it
        takes K pages, then V pages, each with up to 64 elements per token. A padding item takes one
        empty page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from .buffers import BUFFERS
from .dims import Dims, Units, ceil_div
from .dtypes import Dtype
from .launch import PAGE_BYTES
from .operations import Result
from .phases import Phase
from .record import Column

ROW_BYTES = 128
PAGE_ROWS = PAGE_BYTES // ROW_BYTES
BOX_ROWS = 32
CHUNK = 256
K_STEP = ROW_BYTES // 2  # bfloat16 elements per row
STEP_PAGES = 1 + CHUNK // PAGE_ROWS  # pages for one k step of a whole chunk
STAGES = 2  # the number of k steps whose pages an instruction holds at once
WARPGROUP_ROWS = 64  # rows of a wgmma instruction
MAPS = 2  # tensor maps per buffer: for boxes of BOX_ROWS rows, and for whole pages
DOT_PIECE = 1024
PIECE_INNER = 256  # elements in each row of a piece, in the tensor map for weight pages
PIECES = PAGE_BYTES // (2 * DOT_PIECE)  # pieces in a page
# The maximum number of weight pages of dots that an SM prefetches into L2 before its ring has room
# for them. All SMs together fill half of the 50 MB of L2.
AHEAD_PAGES = 12
DOT_UNIT = 8  # column tiles of dots start at multiples of this column
DOT_INPUT_PAGES = 4  # the maximum number of input pages in a lap
NORM_BYTES = 16384  # shared memory for the rows that an instruction of dots normalises
UNITS = 8  # units of attention that a block computes side by side
QUERY_TILE = 16  # (query row, query head) pairs of a unit

Ints = NDArray[np.int64]


class Stream(Enum):
    """What a page is for: who fills it, who releases it."""

    WEIGHTS = "weight loader", "consumers"
    INPUTS = "input loader", "consumers"
    OUTPUT = "consumers", "storer"


# Matmuls on tensor cores store these results through pages, tile by tile. Consumers store all other
# results from registers.
BY_PAGES = (Result.RESIDUAL, Result.PARTIAL, Result.GATED)


def output_columns(phase: Phase, dims: Dims) -> int:
    """The number of a matmul's output columns that fit into a page; 0 if its outputs are not stored
    through pages.
    """
    if phase.result not in BY_PAGES or dims.units != Units.TENSOR or phase.output is None:
        return 0
    return ROW_BYTES // BUFFERS[phase.output].resolve_dtype(dims).itemsize


@dataclass(frozen=True)
class Pages:
    """The number of pages that each instruction takes, by purpose, and the maximum number that it holds at once."""

    weights: Ints
    inputs: Ints
    output: Ints
    held: Ints


def matmul_pages(phase: Phase, rows: Column, cols: Column, dims: Dims) -> Pages:
    """The pages of matmuls with tiles of `rows` x `cols` outputs."""
    return (_dots if dims.units == Units.DOTS else _tensor)(phase, rows.astype(np.int64), cols.astype(np.int64), dims)


def _tensor(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> Pages:
    steps = ceil_div(phase.inner(dims), K_STEP)
    of_weights = phase.matrices(dims) * ceil_div(cols, PAGE_ROWS)
    weights = steps * of_weights
    inputs = steps * ceil_div(phase.matrices(dims) * cols, CHUNK)
    per_page = output_columns(phase, dims)
    output = ceil_div(cols, per_page) if per_page else np.zeros_like(cols)
    step = np.minimum(1 + of_weights, STEP_PAGES)
    return Pages(weights, inputs, output, np.minimum(weights + inputs, STAGES * step))


def first_rows(rows: Ints, dims: Dims) -> Ints:
    """The number of a tile's rows that the first SM of a worker computes on tensor cores. With two
    SMs, these are half of the tile's boxes.
    """
    return np.minimum(rows, BOX_ROWS * ceil_div(rows, dims.sms * BOX_ROWS))


def computed_rows(rows: Ints, dims: Dims) -> Ints:
    """The number of rows that takes a worker's tensor cores as long as these `rows`. An SM always
    multiplies a multiple of WARPGROUP_ROWS rows, and the second of two SMs, if it has fewer, waits
    for the first.
    """
    return dims.sms * WARPGROUP_ROWS * ceil_div(first_rows(rows, dims), WARPGROUP_ROWS)


def tile_work(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> tuple[Ints, Ints]:
    """The FLOPs and loaded bytes of tiles on tensor cores, which always multiply whole weight pages
    by `computed_rows`.
    """
    inner, columns = phase.inner(dims), phase.matrices(dims) * cols
    computed = computed_rows(rows, dims) * phase.matrices(dims) * PAGE_ROWS * ceil_div(cols, PAGE_ROWS)
    loaded = columns + BOX_ROWS * ceil_div(rows, BOX_ROWS) * ceil_div(columns, CHUNK)
    return 2 * inner * computed, Dtype(dims.dtype).itemsize * inner * loaded


def _dots(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> Pages:
    weights = 2 * ceil_div(phase.inner(dims), DOT_PIECE) * ceil_div(phase.matrices(dims) * cols, 2 * PIECES)
    inputs = dot_input_pages(phase, rows, dims)
    lap = np.maximum(dims.ring_pages - inputs, 2) // 2 * 2  # even, so that no pair is split
    return Pages(weights, inputs * -(-weights // lap), np.zeros_like(cols), inputs + np.minimum(weights, lap))


def dot_input_pages(phase: Phase, rows: Ints, dims: Dims) -> Ints:
    """The number of input pages in each lap of a matmul by dots; 0 if the matmul normalises its
    inputs itself.
    """
    return ceil_div(rows * ceil_div(phase.inner(dims), DOT_PIECE), PIECES) * (phase.norm is None)


def ahead_columns(phase: Phase, dims: Dims) -> int:
    """The number of columns of a matmul by dots, in all its matrices together, whose weights are
    prefetched into the L2 cache before the ring has room for them. Only whole columns are
    prefetched, for whole pairs of pages, and only if one copy loads a whole page.
    """
    if phase.inner(dims) % PIECE_INNER:
        return 0
    return AHEAD_PAGES // (2 * -(-phase.inner(dims) // DOT_PIECE)) * 2 * PIECES


def norm_fits(rows: int, inner: int, dims: Dims) -> bool:
    """Whether a matmul can normalise this many rows of its inputs itself."""
    if dims.units == Units.DOTS:
        return rows * inner * Dtype(dims.dtype).itemsize <= NORM_BYTES
    return dims.units == Units.CORE


def chunk_output_pages(phase: Phase, dims: Dims) -> int:
    """The number of output pages for a whole chunk of columns; 0 if outputs are not stored through
    pages.
    """
    per_page = output_columns(phase, dims)
    return -(-CHUNK // (phase.matrices(dims) * per_page)) if per_page else 0


def kv_pages(dims: Dims) -> int:
    """The K and V pages for one KV head and one KV block. Attention holds them at once."""
    return 2 * -(-dims.head_dim // K_STEP)


def attention_pages(item_rows: Column, item_kv_heads: Column, item_blocks: Column, dims: Dims) -> Ints:
    """The number of pages that each attention item takes, all of them for inputs. Padding items
    have no KV blocks.
    """
    tiles = ceil_div(item_rows.astype(np.int64) * dims.group_size, QUERY_TILE)
    units = tiles * item_kv_heads
    # Passes begin at units 0, 8, 16, ... A KV head is loaded once for each pass that has units
    # which use it.
    heads = [
        np.where(first < units, (np.minimum(first + UNITS, units) - 1) // tiles - first // tiles + 1, 0)
        for first in range(0, int(units.max(initial=0)), UNITS)
    ]
    taken: Ints = np.sum(heads, axis=0, dtype=np.int64) * item_blocks * kv_pages(dims)
    return np.where(item_blocks == 0, 1, taken)


def dot_rows(inner: int) -> int:
    """The maximum number of rows in an instruction of dots, if a row has at most `inner` (> 0)
    elements.
    """
    return DOT_INPUT_PAGES * PIECES // -(-inner // DOT_PIECE)
