"""The regions of each kind of instruction: boxes of rows and columns, for a whole column of instructions at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .access import EVERY, OWN, Access, Column, Columns, Index, Kind, item_columns
from .buffers import Buffer
from .dims import Dims
from .pages import Matmul

Accesses = Callable[[Columns, Dims], list[Access]]


def _box(
    buffer: Buffer, kind: Kind, c: Columns, cols: tuple[Column | int, Column | int], rank: int | Column = OWN
) -> Access:
    """Rows from the `row` and `rows` operands."""
    row = c["row"]
    return Access(buffer, kind, row, row + c["rows"], _full(cols[0], row), _full(cols[1], row), rank=rank)


def _peers(d: Dims) -> int:
    """Where a row goes that every rank needs: to all copies, or only to the own where all ranks compute it."""
    return OWN if d.one_hop or d.tp == 1 else EVERY


def _owner(c: Columns, d: Dims) -> int | Column:
    """Whose copy of the residual has the rows of instructions that lie in one row block each."""
    return EVERY if d.one_hop else c["row"] // d.row_block % d.tp


def _reduce_row(c: Columns, d: Dims) -> Column:
    """First row of instructions' rows in a slot of the owner's REDUCE."""
    if d.one_hop:
        return c["row"]
    return c["row"] // d.row_block // d.tp * d.row_block + c["row"] % d.row_block


def _full(value: Column | int, like: Column) -> Column:
    return np.full_like(like, value) if isinstance(value, int) else value


def _tile(c: Columns) -> tuple[Column, Column]:
    return c["col"], c["col"] + c["cols"]


def _overlap(c: Columns, start: int, width: int) -> tuple[Column, Column]:
    """The part of each column tile inside [start, start + width), relative to start; empty where disjoint."""
    col, end = _tile(c)
    low = np.clip(col - start, 0, width)
    return low, np.maximum(np.clip(end - start, 0, width), low)


def embed(c: Columns, d: Dims) -> list[Access]:
    return [_box(Buffer.X, Kind.WRITE, c, (0, d.hidden))]


def rope(c: Columns, d: Dims) -> list[Access]:
    return [_box(Buffer.ROPE, Kind.WRITE, c, (0, d.head_dim))]


def norm(c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.X, Kind.READ, c, (0, d.hidden)),
        _box(Buffer.H, Kind.WRITE, c, (0, d.hidden), _peers(d)),
    ]


def qkv(c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.H, Kind.READ, c, (0, d.hidden)),
        _box(Buffer.ROPE, Kind.READ, c, (0, d.head_dim)),
        _box(Buffer.Q, Kind.WRITE, c, _overlap(c, 0, d.q_cols)),
        _box(Buffer.K_CACHE, Kind.WRITE, c, _overlap(c, d.q_cols, d.kv_cols)),
        _box(Buffer.V_CACHE, Kind.WRITE, c, _overlap(c, d.q_cols + d.kv_cols, d.kv_cols)),
    ]


def attention(c: Columns, d: Dims) -> list[Access]:
    zero = np.zeros_like(c["slot"])
    out: int | None = OWN
    if d.replicated_o and d.tp > 1:
        out = EVERY if d.one_hop else None

    def rows(buffer: Buffer, kind: Kind, rank: int | None = OWN) -> Access:
        first, end = item_columns(buffer, d, 0, d.rank_kv_heads)
        return Access(buffer, kind, zero, zero + d.tokens, zero + first, zero + end, Index.ITEM, rank)

    return [
        rows(Buffer.Q, Kind.READ),
        rows(Buffer.K_CACHE, Kind.READ),
        rows(Buffer.V_CACHE, Kind.READ),
        rows(Buffer.ATTN, Kind.WRITE, out),
    ]


def residual(m: Matmul) -> Accesses:
    def accesses(c: Columns, d: Dims) -> list[Access]:
        return [_box(m.inputs, Kind.READ, c, (0, m.length(d))), _box(Buffer.X, Kind.UPDATE, c, _tile(c))]

    return accesses


def partial(m: Matmul) -> Accesses:
    def accesses(c: Columns, d: Dims) -> list[Access]:
        row = d.rank * d.own_rows + _reduce_row(c, d)
        col, col_end = _tile(c)
        store = Access(Buffer.REDUCE, Kind.WRITE, row, row + c["rows"], col, col_end, rank=_owner(c, d))
        return [_box(m.inputs, Kind.READ, c, (0, m.length(d))), store]

    return accesses


def reduce(ranks: Callable[[Dims], int]) -> Accesses:
    def accesses(c: Columns, d: Dims) -> list[Access]:
        col, col_end = _tile(c)
        rows = [k * d.own_rows + _reduce_row(c, d) for k in range(ranks(d))]
        slots = [Access(Buffer.REDUCE, Kind.READ, row, row + c["rows"], col, col_end) for row in rows]
        return [*slots, _box(Buffer.X, Kind.UPDATE, c, (col, col_end))]

    return accesses


def gate_up(c: Columns, d: Dims) -> list[Access]:
    return [_box(Buffer.H, Kind.READ, c, (0, d.hidden)), _box(Buffer.ACT, Kind.WRITE, c, _tile(c))]


def final_norm(c: Columns, d: Dims) -> list[Access]:
    zero = np.zeros_like(c["row"])
    every = Access(Buffer.X, Kind.READ, zero, zero + d.tokens, zero, zero + d.hidden, Index.LOGIT_ROW)
    rank = _peers(d)
    index = Index.NONE if rank == OWN else Index.LOGIT_OWNER
    row = c["row"]
    return [every, Access(Buffer.Y, Kind.WRITE, row, row + c["rows"], zero, zero + d.hidden, index, rank)]


def lm_head(c: Columns, d: Dims) -> list[Access]:
    """Each row goes to the rank that samples it."""
    col, col_end = (d.first_vocab + edge for edge in _tile(c))
    out = [_box(Buffer.Y, Kind.READ, c, (0, d.hidden))]
    for rank in range(d.tp):
        first = np.maximum(c["row"], rank * d.own_logit_rows)
        end = np.minimum(c["row"] + c["rows"], (rank + 1) * d.own_logit_rows)
        out.append(Access(Buffer.LOGITS, Kind.WRITE, first, np.maximum(first, end), col, col_end, rank=rank))
    return out


def sample(c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.LOGITS, Kind.READ, c, (0, d.vocab)),
        _box(Buffer.TOKENS_OUT, Kind.WRITE, c, (0, 1), 0),
        _box(Buffer.LOGPROBS_OUT, Kind.WRITE, c, (0, 1), 0),
    ]


def none(c: Columns, d: Dims) -> list[Access]:
    return []
