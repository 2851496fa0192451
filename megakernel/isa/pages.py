"""Pages of shared memory: which ones an instruction takes, who fills them, who releases them.

The CUDA interpreter passes everything that it loads for a matmul or for attention, and the outputs that it stores by
tiles, through one ring of pages per block. An instruction takes a run of pages, in an order that follows from its
operands alone; page by page the ring goes on with what comes next, so an instruction can only end if the pages that
it holds at once fit the ring. A page is PAGE_BYTES: PAGE_ROWS rows of ROW_BYTES, loaded and stored in boxes of
BOX_ROWS rows.

tensor  `dims.units` is TENSOR. For each chunk of CHUNK output columns (those of all matrices side by side) and each
        K_STEP of the inner length: the page of the instruction's rows, then a page for each PAGE_ROWS columns of the
        chunk. A step is released when the next one's products are under way. Then, where the output leaves by tiles,
        its pages. Of two SMs (`dims.sms`) each has a ring of its own, in which it takes these pages for its part of
        the rows: `first_rows`, and the rest.
dots    `dims.units` is DOTS. Laps of at most `dims.ring_pages` pages: weight pages, then all of the instruction's rows.
        A weight page has DOT_PIECE elements of PIECES columns; they come in pairs, so that one warp has both columns of
        a RoPE pair, or gate and up. The rows lie in pieces of DOT_PIECE elements, PIECES a page, and are released at
        the end of their lap. Rows that are normalised on the way in take no pages: the consumers keep them in
        NORM_BYTES of shared memory beside the ring.
attention  For each item, each pass over UNITS units (query tiles of QUERY_TILE rows x heads, of one KV head each), each
        KV block and each KV head of the pass: its K pages, then its V pages, each of up to 64 elements a token. An item
        of padding has one page, with nothing in it.
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
K_STEP = ROW_BYTES // 2  # of bfloat16
STEP_PAGES = 1 + CHUNK // PAGE_ROWS  # of a k step of a whole chunk
STAGES = 2  # k steps held at once
WARPGROUP_ROWS = 64  # of a wgmma
MAPS = 2  # tensor maps of a buffer: for boxes of BOX_ROWS rows, and for whole pages
DOT_PIECE = 1024
PIECE_INNER = 256  # elements of a row of a piece, in the tensor map of a page of weights
PIECES = PAGE_BYTES // (2 * DOT_PIECE)  # in a page
AHEAD_PAGES = 12  # of weights of dots, that the last shared cache gets before the ring, at most: half of 50 MB from all
DOT_UNIT = 8  # column tiles of dots start on multiples of this
DOT_INPUT_PAGES = 4  # of an instruction's rows, at most
NORM_BYTES = 16384  # of rows that an instruction of dots has normalised
UNITS = 8  # of attention side by side
QUERY_TILE = 16  # query rows x heads of a unit

Ints = NDArray[np.int64]


class Stream(Enum):
    """What a page is for: who fills it, who releases it."""

    WEIGHTS = "weight loader", "consumers"
    INPUTS = "input loader", "consumers"
    OUTPUT = "consumers", "storer"


# Results that leave a tile by pages where matrix units compute it; of others the consumers store from registers.
BY_PAGES = (Result.RESIDUAL, Result.PARTIAL, Result.GATED)


def output_columns(phase: Phase, dims: Dims) -> int:
    """Output columns of a page of a matmul; 0 where none leave through pages."""
    if phase.result not in BY_PAGES or dims.units != Units.TENSOR or phase.output is None:
        return 0
    return ROW_BYTES // BUFFERS[phase.output].resolve_dtype(dims).itemsize


@dataclass(frozen=True)
class Pages:
    """How many pages each of some instructions takes, by what they are for, and the most that it holds at once."""

    weights: Ints
    inputs: Ints
    output: Ints
    held: Ints


def matmul_pages(phase: Phase, rows: Column, cols: Column, dims: Dims) -> Pages:
    """Of matmuls with tiles of `rows` x `cols` outputs."""
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
    """Rows of a tile of matrix units that the first SM of a worker computes: of two, half of the tile's boxes."""
    return np.minimum(rows, BOX_ROWS * ceil_div(rows, dims.sms * BOX_ROWS))


def computed_rows(rows: Ints, dims: Dims) -> Ints:
    """Rows that the matrix units of a worker are busy with: those of an SM multiply whole WARPGROUP_ROWS rows, and the
    second of two waits for the first."""
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
    lap = np.maximum(dims.ring_pages - inputs, 2) // 2 * 2  # both pages of a pair in the same
    return Pages(weights, inputs * -(-weights // lap), np.zeros_like(cols), inputs + np.minimum(weights, lap))


def dot_input_pages(phase: Phase, rows: Ints, dims: Dims) -> Ints:
    """Pages of the rows of a matmul by dots, which every lap has; none where it normalises them itself."""
    return ceil_div(rows * ceil_div(phase.inner(dims), DOT_PIECE), PIECES) * (phase.norm is None)


def ahead_columns(phase: Phase, dims: Dims) -> int:
    """Columns of a matmul by dots, of all matrices, whose weights come into the last shared cache before the ring has
    room for them: of whole units, and where one copy brings a page."""
    if phase.inner(dims) % PIECE_INNER:
        return 0
    return AHEAD_PAGES // (2 * -(-phase.inner(dims) // DOT_PIECE)) * 2 * PIECES


def norm_fits(rows: int, inner: int, dims: Dims) -> bool:
    """Whether a matmul can normalise so many rows of its inputs on the way in."""
    if dims.units == Units.DOTS:
        return rows * inner * Dtype(dims.dtype).itemsize <= NORM_BYTES
    return dims.units == Units.CORE


def chunk_output_pages(phase: Phase, dims: Dims) -> int:
    """Output pages of a whole chunk of columns; 0 where none leave through pages."""
    per_page = output_columns(phase, dims)
    return -(-CHUNK // (phase.matrices(dims) * per_page)) if per_page else 0


def kv_pages(dims: Dims) -> int:
    """K and V pages of one KV head and one KV block: what attention holds at once."""
    return 2 * -(-dims.head_dim // K_STEP)


def attention_pages(item_rows: Column, item_kv_heads: Column, item_blocks: Column, dims: Dims) -> Ints:
    """Pages of each attention item, all of them inputs. Those of padding have no blocks."""
    tiles = ceil_div(item_rows.astype(np.int64) * dims.group_size, QUERY_TILE)
    units = tiles * item_kv_heads
    # A pass begins with unit 0, 8, 16 ..; a KV head is loaded once for each pass that its units meet.
    heads = [
        np.where(first < units, (np.minimum(first + UNITS, units) - 1) // tiles - first // tiles + 1, 0)
        for first in range(0, int(units.max(initial=0)), UNITS)
    ]
    taken: Ints = np.sum(heads, axis=0, dtype=np.int64) * item_blocks * kv_pages(dims)
    return np.where(item_blocks == 0, 1, taken)


def dot_rows(inner: int) -> int:
    """Most rows of an instruction of dots whose inputs are at most `inner` (> 0) long."""
    return DOT_INPUT_PAGES * PIECES // -(-inner // DOT_PIECE)
