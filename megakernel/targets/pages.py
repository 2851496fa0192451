"""Pages of shared memory: their sizes, and how many of them each instruction takes. csrc/cuda/plan.h lists the pages.

All operands that matmuls and attention load pass through pages, except rows that a matmul normalises. A thread block
has a ring buffer of pages of PAGE_BYTES: PAGE_ROWS rows of ROW_BYTES. Loader warps fill pages, and consumer warps
compute on them. Some outputs are stored through pages, too. Each instruction takes the next pages of the ring, and its
operands determine the contents of each page. So loaders and consumers agree without communicating. The ring must have
as many pages as an instruction holds at once. A TMA copy is a whole page or a box of BOX_ROWS rows. The contents depend
on the kind of instruction:

tensor     Matmuls on tensor cores (`dims.worker.units` is TENSOR). The output columns of all weight matrices, side by
           side, are divided into chunks of CHUNK columns, and the inner dimension into k steps of K_STEP elements. Each
           k step of each chunk takes a stage of the ring, which is STEP_PAGES successive pages: one page of input rows,
           then one page for each PAGE_ROWS columns of the chunk. Stages for outputs follow if pages store them.
dots       Matmuls as dot products (`dims.worker.units` is DOTS). Weight columns and input rows are divided into pieces
           of DOT_PIECE elements, and a page has PIECES pieces. A weight page has one piece of each of PIECES columns.
           Weight pages come in pairs, so that one warp has both columns of a RoPE pair, or a gate column and its up
           column. The ring is filled several times, and each filling is called a lap: first weight pages, then pages
           with all of the instruction's input rows. The input pages are released at the end of the lap, and loaded
           again in the next lap. If the matmul normalises its input rows itself, they take no pages: the consumers keep
           them in NORM_BYTES of shared memory beside the ring. The kernel for one token row keeps all inputs beside
           the ring, in COPY_BYTES; its ring has ROW_PAGES pages.
attention  An attention item has query rows of one sequence and a range of its KV blocks. The rows are divided into
           query tiles, called units. A unit has QUERY_TILE (row, head) pairs that use one KV head, or one of two parts
           of it if heads have more than HEAD_PART elements. The thread block computes UNITS units at a time, in one
           pass over the KV blocks. For each KV block and KV head of a pass, there are K pages, then V pages, each with
           up to 64 elements per token. Items that only pad the list of items take one empty page.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import PHASE_FIELDS, Column, Dims, Dtype, Phase, Units, ceil_div
from ..library import load
from .launch import PAGE_BYTES, PAGES

ROW_BYTES = 128
PAGE_ROWS = PAGE_BYTES // ROW_BYTES
BOX_ROWS = 32
CHUNK = 256
K_STEP = ROW_BYTES // 2  # bfloat16 elements per row
STEP_PAGES = 1 + CHUNK // PAGE_ROWS  # pages of a stage: one of inputs, and those with CHUNK weight columns
STAGES = 4  # stages in the ring buffer of pages, each with STEP_PAGES pages
WARPGROUP_ROWS = 64  # rows that one wgmma instruction multiplies
MAPS = 2  # tensor maps per buffer: one for boxes of BOX_ROWS rows, one for whole pages
DOT_PIECE = 1024
# TMA copies at most 256 elements per dimension. So the tensor map for weights treats DOT_PIECE successive elements as a
# two-dimensional array, with this many elements in its inner dimension.
PIECE_INNER = 256
PIECES = PAGE_BYTES // (2 * DOT_PIECE)  # pieces in a page

# For matmuls as dot products, at most WINDOW_PAGES pages of weights are on their way to an SM. While its shared memory
# has no room for weights, it prefetches a page into L2 every AHEAD_NS. In this time, an H100's memory delivers a page
# to each SM. It prefetches at most AHEAD_PAGES pages: those of all SMs take 30 of the 50 MB of L2.
WINDOW_PAGES, AHEAD_PAGES, AHEAD_NS = 3, 14, 800
DOT_UNIT = 8  # column tiles of matmuls as dot products start at multiples of this number of columns
DOT_INPUT_PAGES = 4  # maximum number of input pages that a matmul as dot products holds in the ring
NORM_BYTES = 16384  # shared memory for input rows that a matmul as dot products normalises itself
# The interpreter's build for one token row has a page less in its ring, as it keeps inputs outside the ring.
ROW_PAGES, COPY_BYTES = PAGES - 1, NORM_BYTES + PAGE_BYTES - 1024
UNITS = 8  # query tiles of attention (units) that a thread block computes at the same time
QUERY_TILE = 16  # (query row, query head) pairs of a query tile
HEAD_PART = 128  # the maximum number of a head's elements that a unit computes; a wider head has two units

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pages:
    """The number of shared-memory pages that each matmul instruction takes, by use, and three further numbers:

    held         how many pages the instruction holds at once
    held_inputs  how many of them are input pages that stay in the ring together; 0 for tensor cores
    last         the output pages of its widest chunk of columns
    """

    weights: Ints
    inputs: Ints
    output: Ints
    held: Ints
    held_inputs: Ints
    last: Ints


@functools.lru_cache(maxsize=1024)
def _words(phase: Phase, dims: Dims) -> ctypes.Array[ctypes.c_int32]:
    """Return the contents of the C++ struct `Phase`, as an array that native functions take."""
    return (ctypes.c_int32 * len(PHASE_FIELDS))(*(field.value(phase, dims) for field in PHASE_FIELDS))


def _int32(column: Column) -> NDArray[np.int32]:
    return np.ascontiguousarray(column, np.int32)


def one_row(dims: Dims) -> bool:
    """Whether the special build of the CUDA interpreter for one token row runs programs of these sizes."""
    return dims.worker.ring_pages == ROW_PAGES


def own_ring(dims: Dims) -> Dims:
    """Return `dims` with the number of ring pages of the kernel that runs such programs. The build for one row runs
    programs of one row on one GPU, without experts, if shared memory has room for their inputs beside the ring."""
    alone, model = dims.bucket.tokens == dims.split.tp == 1, dims.model
    fits = 2 * max(model.hidden, model.ffn, model.heads * model.head_dim) <= COPY_BYTES
    own = alone and fits and dims.worker.units == Units.DOTS and not model.experts
    return dims.changed(ring_pages=ROW_PAGES) if own else dims


def matmul_pages(phase: Phase, rows: Column, cols: Column, dims: Dims) -> Pages:
    """Return the pages of matmul instructions whose tiles have `rows` x `cols` outputs."""
    rows, cols = _int32(rows), _int32(cols)
    out = np.empty((len(rows), 6), np.int32)
    of = ctypes.byref(dims.native), _words(phase, dims), len(rows)
    load().mk_matmul_pages(*of, rows.ctypes.data, cols.ctypes.data, out.ctypes.data)
    return Pages(*np.ascontiguousarray(out.T, np.int64))


def attention_pages(item_rows: Column, item_kv_heads: Column, item_blocks: Column, dims: Dims) -> Ints:
    """Return the number of shared-memory pages that each attention item takes. Padding items have no KV blocks."""
    columns = [_int32(column) for column in (item_rows, item_kv_heads, item_blocks)]
    out = np.empty(len(columns[0]), np.int64)
    at = (column.ctypes.data for column in columns)
    load().mk_attention_pages(ctypes.byref(dims.native), len(out), *at, out.ctypes.data)
    return out


def head_units(rows: Column, dims: Dims) -> Ints:
    """Return how many units (query tiles) an attention item with `rows` query rows has for each KV head."""
    rows, out = _int32(rows), np.empty(len(rows), np.int64)
    load().mk_head_units(ctypes.byref(dims.native), len(rows), rows.ctypes.data, out.ctypes.data)
    return out


def pass_rows(dims: Dims) -> int:
    """Return how many query rows of one KV head fill all UNITS units (query tiles) of a thread block."""
    return int(load().mk_pass_rows(ctypes.byref(dims.native)))


def kv_pages(dims: Dims) -> int:
    """Return the number of K and V pages for one KV head and one KV block. Attention holds all of them at once."""
    return int(load().mk_kv_pages(ctypes.byref(dims.native)))


def output_columns(phase: Phase, dims: Dims) -> int:
    """Return how many output columns of a matmul fit into a page; 0 if its outputs are not stored through pages."""
    return int(load().mk_output_columns(ctypes.byref(dims.native), _words(phase, dims)))


def computed_rows(rows: Ints) -> Ints:
    """Return how many rows tensor cores compute for tiles of `rows` rows: a multiple of WARPGROUP_ROWS."""
    return WARPGROUP_ROWS * ceil_div(rows, WARPGROUP_ROWS)


def tile_work(phase: Phase, rows: Ints, cols: Ints, dims: Dims) -> tuple[Ints, Ints]:
    """Return, for each tile, the FLOPs that tensor cores execute, with padding, and the bytes that are loaded."""
    inner, columns = phase.inner(dims.split), phase.matrices(dims.split) * cols
    computed = computed_rows(rows) * phase.matrices(dims.split) * PAGE_ROWS * ceil_div(cols, PAGE_ROWS)
    loaded = columns + BOX_ROWS * ceil_div(rows, BOX_ROWS) * ceil_div(columns, CHUNK)
    return 2 * inner * computed, Dtype(dims.model.dtype).itemsize * inner * loaded


def norm_rows(inner: int, dims: Dims) -> int:
    """The maximum number of rows of `inner` (> 0) elements that a matmul can normalise itself, instead of a norm."""
    if dims.worker.units == Units.DOTS:
        return NORM_BYTES // (inner * Dtype(dims.model.dtype).itemsize)
    return dims.bucket.tokens if dims.worker.units == Units.CORE else 0


def dot_rows(inner: int) -> int:
    """The maximum number of rows of a matmul as dot products whose input rows have at most `inner` (> 0) elements."""
    return DOT_INPUT_PAGES * PIECES // -(-inner // DOT_PIECE)
