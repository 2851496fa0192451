"""Pages of shared memory: which pages an instruction takes, who fills them, and who releases them.

All operands that the CUDA interpreter loads for matmuls and attention, and the outputs that it stores by tiles, pass
through one ring of pages per block. An instruction takes a run of pages in an order that follows from its operands
alone, and the next instruction continues with the next page of the ring. An instruction can finish only if the ring has
at least as many pages as the instruction holds at once. A page is PAGE_BYTES: PAGE_ROWS rows of ROW_BYTES, loaded and
stored in boxes of BOX_ROWS rows.

tensor  `dims.units` is TENSOR. For each chunk of CHUNK output columns (those of all matrices side by side) and each
        K_STEP of the inner length: the page of the instruction's rows, then a page for each PAGE_ROWS columns of the
        chunk. The pages of a k step are released when the products of the next k step are under way. If the output is
        stored through pages, output pages follow. With two SMs (`dims.sms`), each has its own ring and takes these
        pages for its part of the rows: the first SM for `first_rows`, the second for the rest.
dots    `dims.units` is DOTS. The pages come in laps of at most `dims.ring_pages`: first weight pages, then all of the
        instruction's rows. A weight page has DOT_PIECE elements of PIECES columns. Weight pages come in pairs, so that
        one warp has both columns of a RoPE pair, or a gate and its up column. The rows lie in pieces of DOT_PIECE
        elements, PIECES per page, and are released at the end of their lap. Rows that the matmul normalises take no
        pages: the consumers keep them in NORM_BYTES of shared memory beside the ring.
attention  An item makes passes over UNITS units at a time (query tiles of QUERY_TILE rows x heads, each of one KV
        head). For each pass, KV block and KV head of the pass, it takes K pages, then V pages, each with up to 64
        elements per token. A padding item takes one empty page.
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
STEP_PAGES = 1 + CHUNK // PAGE_ROWS  # pages of a k step of a whole chunk
STAGES = 2  # k steps whose pages an instruction holds at once
WARPGROUP_ROWS = 64  # rows of a wgmma
MAPS = 2  # tensor maps per buffer: for boxes of BOX_ROWS rows, and for whole pages
DOT_PIECE = 1024
PIECE_INNER = 256  # elements per row of a piece, in the tensor map of a weight page
PIECES = PAGE_BYTES // (2 * DOT_PIECE)  # pieces in a page
# The maximum number of weight pages of dots that an SM prefetches into L2 before its ring has room for them. Together
# the SMs fill half of the 50 MB.
AHEAD_PAGES = 12
DOT_UNIT = 8  # column tiles of dots start on multiples of this
DOT_INPUT_PAGES = 4  # the maximum number of pages for an instruction's rows in a lap
NORM_BYTES = 16384  # shared memory for the rows that an instruction of dots normalises
UNITS = 8  # units of attention that are computed side by side
QUERY_TILE = 16  # query rows x heads of a unit

Ints = NDArray[np.int64]


class Stream(Enum):
    """What a page is for: who fills it, who releases it."""

    WEIGHTS = "weight loader", "consumers"
    INPUTS = "input loader", "consumers"
    OUTPUT = "consumers", "storer"


# Results that matrix units store through pages, tile by tile; consumers store all other results from registers.
BY_PAGES = (Result.RESIDUAL, Result.PARTIAL, Result.GATED)


def output_columns(phase: Phase, dims: Dims) -> int:
    """The output columns per page of a matmul; 0 if its outputs do not leave through pages."""
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
    """The rows of a tile that the first SM of a worker computes with its matrix units: with two SMs, half of the tile's
    boxes.
    """
    return np.minimum(rows, BOX_ROWS * ceil_div(rows, dims.sms * BOX_ROWS))


def computed_rows(rows: Ints, dims: Dims) -> Ints:
    """The rows for which the matrix units of a worker are busy. An SM multiplies whole multiples of WARPGROUP_ROWS
    rows, and the second of two SMs waits for the first.
    """
    return dims.sms * WARPGROUP_ROWS * ceil_div(first_rows(rows, dims), WARPGROUP_ROWS)


def tile_work(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> tuple[Ints, Ints]:
    """FLOPs and loaded bytes of tiles on matrix units, which multiply whole weight pages and `computed_rows`."""
    inner, columns = phase.inner(dims), phase.matrices(dims) * cols
    computed = computed_rows(rows, dims) * phase.matrices(dims) * PAGE_ROWS * ceil_div(cols, PAGE_ROWS)
    loaded = columns + BOX_ROWS * ceil_div(rows, BOX_ROWS) * ceil_div(columns, CHUNK)
    return 2 * inner * computed, Dtype(dims.dtype).itemsize * inner * loaded


def _dots(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> Pages:
    weights = 2 * ceil_div(phase.inner(dims), DOT_PIECE) * ceil_div(phase.matrices(dims) * cols, 2 * PIECES)
    inputs = dot_input_pages(phase, rows, dims)
    lap = np.maximum(dims.ring_pages - inputs, 2) // 2 * 2  # both pages of a pair lie in the same lap
    return Pages(weights, inputs * -(-weights // lap), np.zeros_like(cols), inputs + np.minimum(weights, lap))


def dot_input_pages(phase: Phase, rows: Ints, dims: Dims) -> Ints:
    """The input pages of a matmul by dots in each lap; none if the matmul normalises its inputs itself."""
    return ceil_div(rows * ceil_div(phase.inner(dims), DOT_PIECE), PIECES) * (phase.norm is None)


def ahead_columns(phase: Phase, dims: Dims) -> int:
    """The number of columns, over all matrices of a matmul by dots, whose weights are prefetched into the L2 cache
    before the ring has room for them. Only whole units are prefetched, and only if one copy loads a whole page.
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
    """The output pages of a whole chunk of columns; 0 if outputs do not leave through pages."""
    per_page = output_columns(phase, dims)
    return -(-CHUNK // (phase.matrices(dims) * per_page)) if per_page else 0


def kv_pages(dims: Dims) -> int:
    """The K and V pages of one KV head and one KV block, which attention holds at once."""
    return 2 * -(-dims.head_dim // K_STEP)


def attention_pages(item_rows: Column, item_kv_heads: Column, item_blocks: Column, dims: Dims) -> Ints:
    """The pages of each attention item, all of them inputs. Padding items have no blocks."""
    tiles = ceil_div(item_rows.astype(np.int64) * dims.group_size, QUERY_TILE)
    units = tiles * item_kv_heads
    # A pass begins with unit 0, 8, 16, ...; a KV head is loaded once for each pass that contains units of it.
    heads = [
        np.where(first < units, (np.minimum(first + UNITS, units) - 1) // tiles - first // tiles + 1, 0)
        for first in range(0, int(units.max(initial=0)), UNITS)
    ]
    taken: Ints = np.sum(heads, axis=0, dtype=np.int64) * item_blocks * kv_pages(dims)
    return np.where(item_blocks == 0, 1, taken)


def dot_rows(inner: int) -> int:
    """The maximum number of rows of an instruction of dots if a row has at most `inner` (> 0) elements."""
    return DOT_INPUT_PAGES * PIECES // -(-inner // DOT_PIECE)
