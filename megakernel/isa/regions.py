"""Derives which regions of buffers the instructions of a phase read and write. An `Access` describes one buffer: its
arrays give a range of rows and a range of columns for each instruction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .access import EVERY, OWN, Access, Columns, Index, Kind, item_columns
from .buffers import BUFFERS, Buffer
from .dims import Dims
from .operations import Operation, Result, Rows
from .phases import Phase
from .record import Column


def accesses(phase: Phase, columns: Columns, dims: Dims) -> list[Access]:
    """Return the accesses of instructions of `phase` on rank `dims.rank`. `columns` has the instructions' operands."""
    return _REGIONS[phase.operation](phase, columns, dims)


def _box(
    buffer: Buffer, kind: Kind, c: Columns, cols: tuple[Column | int, Column | int], rank: int | Column = OWN
) -> Access:
    """Return an access to the columns `cols` of `buffer`, and to the rows that the operands `row` and `rows` give."""
    row = c["row"]
    return Access(buffer, kind, row, row + c["rows"], _full(cols[0], row), _full(cols[1], row), rank=rank)


def _full(value: Column | int, like: Column) -> Column:
    return np.full_like(like, value) if isinstance(value, int) else value


def _peers(d: Dims) -> int:
    """Return where to store a row that every rank needs: at EVERY rank, or only at the OWN rank if all
    ranks compute the row themselves.
    """
    return OWN if d.replicated_residual or d.tp == 1 else EVERY


def _given(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer


def _tile(c: Columns) -> tuple[Column, Column]:
    return c["col"], c["col"] + c["cols"]


def _overlap(c: Columns, start: int, width: int) -> tuple[Column, Column]:
    """Return the part of each column tile that lies inside [start, start + width): its first column
    and its end, both relative to `start`. The two are equal if the part is empty.
    """
    col, end = _tile(c)
    low = np.clip(col - start, 0, width)
    return low, np.maximum(np.clip(end - start, 0, width), low)


def _whole_rows(p: Phase, c: Columns, d: Dims) -> list[Access]:
    """Return the accesses of the operations GATHER and ROPE."""
    output = _given(p.output)
    return [_box(output, Kind.WRITE, c, (0, BUFFERS[output].shape(d, 0)[-1]))]


def _norm(p: Phase, c: Columns, d: Dims) -> list[Access]:
    inputs, output = _given(p.inputs), _given(p.output)
    if p.rows is not Rows.LOGIT:
        whole = (0, p.inner(d))
        return [_box(inputs, Kind.READ, c, whole), _box(output, Kind.WRITE, c, whole, _peers(d))]
    row, rank = c["row"], _peers(d)
    zero = np.zeros_like(row)
    inner = zero + p.inner(d)
    index = Index.NONE if rank == OWN else Index.LOGIT_OWNER
    return [
        Access(inputs, Kind.READ, zero, zero + d.tokens, zero, inner, Index.LOGIT_ROW),
        Access(output, Kind.WRITE, row, row + c["rows"], zero, inner, index, rank),
    ]


def _matmul(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [_box(_given(p.inputs), Kind.READ, c, (0, p.inner(d))), *_RESULTS[p.result](p, c, d)]


def _heads(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.ROPE, Kind.READ, c, (0, d.head_dim)),
        _box(Buffer.Q, Kind.WRITE, c, _overlap(c, 0, d.q_cols)),
        _box(Buffer.K_CACHE, Kind.WRITE, c, _overlap(c, d.q_cols, d.kv_cols)),
        _box(Buffer.V_CACHE, Kind.WRITE, c, _overlap(c, d.q_cols + d.kv_cols, d.kv_cols)),
    ]


def _partial(p: Phase, c: Columns, d: Dims) -> list[Access]:
    """Return the accesses that store partial sums at each rank that keeps these rows of the residual.
    The rows of an instruction lie in one row block.
    """
    row, rank = d.reduce_row(d.rank, c["row"]), EVERY if d.replicated_residual else d.owner(c["row"])
    return [Access(_given(p.output), Kind.WRITE, row, row + c["rows"], *_tile(c), rank=rank)]


def _logits(p: Phase, c: Columns, d: Dims) -> list[Access]:
    """Return the accesses that store each row of logits at the rank that samples the row."""
    col, col_end = (d.first_vocab + edge for edge in _tile(c))
    out = []
    for rank in range(d.tp):
        first = np.maximum(c["row"], rank * d.own_logit_rows)
        end = np.minimum(c["row"] + c["rows"], (rank + 1) * d.own_logit_rows)
        out.append(Access(_given(p.output), Kind.WRITE, first, np.maximum(first, end), col, col_end, rank=rank))
    return out


def _attention(p: Phase, c: Columns, d: Dims) -> list[Access]:
    zero = np.zeros_like(c["slot"])
    out: int | None = OWN
    if d.replicated_o and d.tp > 1:
        out = EVERY if d.replicated_residual else None

    def rows(buffer: Buffer, kind: Kind, rank: int | None = OWN) -> Access:
        first, end = item_columns(buffer, d, 0, d.rank_kv_heads)
        return Access(buffer, kind, zero, zero + d.tokens, zero + first, zero + end, Index.ITEM, rank)

    return [
        rows(_given(p.inputs), Kind.READ),
        rows(Buffer.K_CACHE, Kind.READ),
        rows(Buffer.V_CACHE, Kind.READ),
        rows(_given(p.output), Kind.WRITE, out),
    ]


def _reduce(p: Phase, c: Columns, d: Dims) -> list[Access]:
    rows = [d.reduce_row(rank, c["row"]) for rank in range(p.ranks(d))]
    slots = [Access(_given(p.inputs), Kind.READ, row, row + c["rows"], *_tile(c)) for row in rows]
    return [*slots, _box(_given(p.output), Kind.UPDATE, c, _tile(c))]


def _sample(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [
        _box(_given(p.inputs), Kind.READ, c, (0, d.vocab)),
        _box(Buffer.TOKENS_OUT, Kind.WRITE, c, (0, 1), 0),
        _box(Buffer.LOGPROBS_OUT, Kind.WRITE, c, (0, 1), 0),
    ]


def _nothing(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return []


_Regions = Callable[[Phase, Columns, Dims], list[Access]]

_RESULTS: dict[Result, _Regions] = {
    Result.HEADS: _heads,
    Result.RESIDUAL: lambda p, c, d: [_box(_given(p.output), Kind.UPDATE, c, _tile(c))],
    Result.PARTIAL: _partial,
    Result.GATED: lambda p, c, d: [_box(_given(p.output), Kind.WRITE, c, _tile(c))],
    Result.LOGITS: _logits,
}

_REGIONS: dict[Operation, _Regions] = {
    Operation.JOIN: _nothing,
    Operation.DRAIN: _nothing,
    Operation.GATHER: _whole_rows,
    Operation.ROPE: _whole_rows,
    Operation.NORM: _norm,
    Operation.MATMUL: _matmul,
    Operation.ATTENTION: _attention,
    Operation.REDUCE: _reduce,
    Operation.SAMPLE: _sample,
}
