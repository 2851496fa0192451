"""MATMUL multiplies rows by one or two weight matrices. The phase's `Result` says what happens to the products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import EVERY, Access, Columns, Kind
from ..buffers import Buffer, given
from ..context import F32, Context, capped, rms_norm
from ..dims import Dims
from ..dtypes import Dtype, from_f32, to_f32
from ..opcodes import Result, Rows
from ..phases import Phase
from ..record import Column
from .spec import (
    Contents,
    Cost,
    Cut,
    OperationSpec,
    activations,
    box,
    contents,
    logits,
    partial_sums,
    tile,
    vector,
    weight_rows,
    weights,
    work,
)


@dataclass(frozen=True)
class ResultSpec:
    """What a matmul does with t, its products plus the bias.

    `meaning`   a description for readers
    `accesses`  (phase, columns, dims): returns the regions of buffers that instructions access besides their inputs;
                `columns` has an array with all instructions' values for each operand
    `output`    (width, dims): describes the buffer for the output of a matmul with `width` output columns on this rank
    `store`     (context, row, col, *t): stores t, one array [rows, cols] per matrix
    """

    meaning: str
    accesses: Callable[[Phase, Columns, Dims], list[Access]]
    output: Callable[[int, Dims], Contents]
    store: Callable[..., None]


def _slices(c: Context, row: int, col: int, t: F32) -> tuple[slice, slice]:
    return slice(row, row + len(t)), slice(col, col + t.shape[1])


def _tile_of(kind: Kind) -> Callable[[Phase, Columns, Dims], list[Access]]:
    return lambda p, c, d: [box(given(p.output), kind, c, tile(c))]


# -- HEADS


def _part(c: Columns, start: int, width: int) -> tuple[Column, Column]:
    """Return, for each tile, its columns inside [start, start + width) as [begin, end), counted from `start`."""
    col, end = tile(c)
    low = np.clip(col - start, 0, width)
    return low, np.maximum(np.clip(end - start, 0, width), low)


def _heads_accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [
        box(Buffer.ROPE, Kind.READ, c, (0, d.model.head_dim)),
        box(Buffer.Q, Kind.WRITE, c, _part(c, 0, d.split.q_cols)),
        box(Buffer.K_CACHE, Kind.WRITE, c, _part(c, d.split.q_cols, d.split.kv_cols)),
        box(Buffer.V_CACHE, Kind.WRITE, c, _part(c, d.split.q_cols + d.split.kv_cols, d.split.kv_cols)),
    ]


def _store_heads(c: Context, row: int, col: int, t: F32) -> None:
    d = c.dims
    r = slice(row, row + len(t))
    column = np.arange(col, col + t.shape[1])
    if c.phase.whole_heads(d.model):
        assert col % d.model.head_dim == 0 and len(column) % d.model.head_dim == 0
    rotated = int(np.count_nonzero(column < d.split.q_cols + d.split.kv_cols))
    if c.phase.head_norm is not None:
        heads = t[:, :rotated].reshape(len(t), -1, d.model.head_dim)
        kind = (column[: rotated : d.model.head_dim] >= d.split.q_cols).astype(int)
        scales = c.read(c.phase.head_norm)[kind]
        early = np.ones_like(scales) if d.model.late_scales else scales
        t[:, :rotated] = rms_norm(heads, early, d.model.rms_eps).reshape(len(t), -1)
    even = column[:rotated:2] % d.model.head_dim
    rope = c.read(Buffer.ROPE, r)
    cos, sin = rope[:, even], rope[:, even + 1]
    a, b = t[:, :rotated:2].copy(), t[:, 1:rotated:2].copy()
    t[:, :rotated:2] = a * cos - b * sin
    t[:, 1:rotated:2] = b * cos + a * sin
    if c.phase.head_norm is not None and d.model.late_scales:
        t[:, :rotated] *= scales.ravel()

    q = column < d.split.q_cols
    c.write(c.output, (r, column[q]), t[:, q])
    live = np.flatnonzero(c.table.row_seq[r] >= 0)
    sequences, positions = c.table.row_seq[r][live], c.table.positions[r][live]
    for buffer, first in ((Buffer.K_CACHE, d.split.q_cols), (Buffer.V_CACHE, d.split.q_cols + d.split.kv_cols)):
        mine = (column >= first) & (column < first + d.split.kv_cols)
        c.write_cache(buffer, sequences, positions, column[mine] - first, t[np.ix_(live, mine)])


# -- RESIDUAL, GATED


def _add_residual(c: Context, row: int, col: int, t: F32) -> None:
    at = _slices(c, row, col, t)
    c.write(c.output, at, c.read(c.output, at) + t)


def gated(gate: F32, up: F32, result: Result = Result.GATED) -> F32:
    """Return silu(gate) * up, or gelu(gate) * up if `result` is GELU_GATED."""
    x = gate
    if result is Result.GELU_GATED:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), so GELU's approximation by tanh is SiLU with another exponent.
        x = np.float32(2 * math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
    with np.errstate(over="ignore"):  # if a gate is a large negative number, exp overflows and the result is 0
        out: F32 = gate / (1 + np.exp(-x)) * up
    return out


def _store_gated(c: Context, row: int, col: int, gate: F32, up: F32) -> None:
    c.write(c.output, _slices(c, row, col, gate), gated(gate, up, c.phase.result))


def _store(c: Context, row: int, col: int, t: F32) -> None:
    c.write(c.output, _slices(c, row, col, t), t)


# -- PARTIAL


def _partial_accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    """Return the writes of partial sums to the ranks that keep the rows' residual. A tile is inside one row block."""
    row, rank = d.reduce_row(d.split.rank, c["row"]), EVERY if d.split.replicated_residual else d.owner(c["row"])
    return [Access(given(p.output), Kind.WRITE, row, row + c["rows"], *tile(c), rank=rank)]


def _store_partial(c: Context, row: int, col: int, t: F32) -> None:
    rows = c.reduce_rows(c.dims.split.rank, row, len(t))
    c.store(c.output, c.dims.owners(row), (rows, slice(col, col + t.shape[1])), t)


# -- LOGITS


def _logits_accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    """Return the accesses that store each row of logits at the rank that samples the row."""
    col, col_end = (d.split.first_vocab + edge for edge in tile(c))
    out = []
    for rank in range(d.split.tp):
        first = np.maximum(c["row"], rank * d.own_logit_rows)
        end = np.minimum(c["row"] + c["rows"], (rank + 1) * d.own_logit_rows)
        out.append(Access(given(p.output), Kind.WRITE, first, np.maximum(first, end), col, col_end, rank=rank))
    return out


def _store_logits(c: Context, row: int, col: int, t: F32) -> None:
    columns = slice(c.dims.split.first_vocab + col, c.dims.split.first_vocab + col + t.shape[1])
    for i, line in enumerate(capped(t, c.dims.model.logit_cap), row):
        c.store(c.output, (i // c.dims.own_logit_rows,), (i, columns), line)


RESULTS: dict[Result, ResultSpec] = {
    Result.HEADS: ResultSpec(
        "q in buffer Q, k and v in a KV page, each rounded once; q and k are first rotated by the angles in ROPE[r], "
        "before or after the scales of `head_norm`, as the model says",
        _heads_accesses,
        lambda width, d: contents(Buffer.Q, d),
        _store_heads,
    ),
    Result.RESIDUAL: ResultSpec(
        "added to the residual: output[r] += t, in float32",
        _tile_of(Kind.UPDATE),
        lambda width, d: activations(d.bucket.tokens, width, Dtype.F32),
        _add_residual,
    ),
    Result.PARTIAL: ResultSpec(
        "on each rank that keeps row r's residual, as a partial sum of this rank: output[this rank][r] = t",
        _partial_accesses,
        lambda width, d: partial_sums(d, width),
        _store_partial,
    ),
    Result.GATED: ResultSpec(
        "output[r] = silu(t of the first matrix) * (t of the second), rounded once",
        _tile_of(Kind.WRITE),
        lambda width, d: activations(d.bucket.tokens, width),
        _store_gated,
    ),
    Result.GELU_GATED: ResultSpec(
        "output[r] = gelu(t of the first matrix) * (t of the second), rounded once; gelu is approximated by tanh",
        _tile_of(Kind.WRITE),
        lambda width, d: activations(d.bucket.tokens, width),
        _store_gated,
    ),
    Result.STORED: ResultSpec(
        "output[r] = t, in float32",
        _tile_of(Kind.WRITE),
        lambda width, d: activations(d.bucket.tokens, width, Dtype.F32),
        _store,
    ),
    Result.LOGITS: ResultSpec(
        "output[i] = t, or logit_cap * tanh(t / logit_cap), in float32, for this rank's part of the vocabulary, on the "
        "rank that samples row i",
        _logits_accesses,
        lambda width, d: logits(d),
        _store_logits,
    ),
}


GATES = (Result.GATED, Result.GELU_GATED)


# -- the matmul itself


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [box(given(p.inputs), Kind.READ, c, (0, p.inner(d.split))), *RESULTS[p.result].accesses(p, c, d)]


def weight_bytes(phase: Phase, cols: NDArray[Any], dims: Dims) -> NDArray[np.float64]:
    """Return the number of bytes that the weights for `cols` output columns of a matmul take in memory."""
    return cols.astype(np.float64) * (
        phase.matrices(dims.split) * phase.inner(dims.split) * phase.stored_bits(dims.model) / 8
    )


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    """Return the cost of matmul tiles. Tiles with the same columns use the same weights. Only one of them, with the
    rank's first row, counts as reading the weights from memory; the others find them in a cache. If the phase
    normalises its inputs, each tile does so once."""
    # The positions of the tiles' first rows among the rank's rows.
    place = d.reduce_place(c["row"]) if p.rows is Rows.OWN else c["row"]
    products = c["cols"].astype(np.float64) * p.matrices(d.split) * p.inner(d.split)
    return work(
        c,
        matrix=2.0 * c["rows"] * products,
        vector=0.0 if p.norm is None else 4.0 * c["rows"] * p.inner(d.split),
        memory=np.where(place == 0, weight_bytes(p, c["cols"], d), 0.0),
    )


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    width, inner = weight_rows(p, d), p.inner(d.split)
    rows = d.bucket.logit_rows if p.rows is Rows.LOGIT else d.bucket.tokens
    output = RESULTS[p.result].output(width, d)
    width = {Result.HEADS: d.split.qkv_cols, Result.LOGITS: d.split.rank_vocab}.get(p.result, width)
    matrices = (2,) if p.result in GATES else ()
    out = {
        "weights": weights(*matrices, width, inner),
        "inputs": activations(rows, inner, None if p.norm is None else Dtype.F32),
        "output": output,
        "norm": vector(inner),
    }
    if p.result is not Result.PARTIAL:  # the reduction adds the bias once, instead of the matmul of each rank
        out["bias"] = vector(*matrices, width)
    if p.result is Result.HEADS:
        out["head_norm"] = vector(2, d.model.head_dim)
    return out


def _matmul(c: Context, row: int, rows: int, col: int, cols: int) -> None:
    columns = slice(col, col + cols)
    a = c.read(c.inputs, slice(row, row + rows))
    if c.phase.norm is not None:
        # A separate norm instruction would store its result in a buffer, so round to the type of that buffer.
        a = to_f32(from_f32(rms_norm(a, c.read(c.phase.norm), c.dims.model.rms_eps), Dtype(c.dims.model.dtype)))
    count = c.phase.matrices(c.dims.split)
    results = [c.biased(c.products(a, i, col, cols), columns if count == 1 else (i, columns)) for i in range(count)]
    RESULTS[c.phase.result].store(c, row, col, *results)


MATMUL = OperationSpec(
    "t = inputs[r] weights^T + bias; if the phase has a norm, the inputs are normalised first. The phase's `result`, "
    "one of those in the next table, determines where t is stored",
    Cut.TILES,
    _accesses,
    _cost,
    _buffers,
    _matmul,
    rows=lambda p: (Rows.LOGIT,) if p.result is Result.LOGITS else (Rows.EVERY, Rows.OWN),
    results=tuple(RESULTS),
    paged=True,
)
