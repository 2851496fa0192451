"""Cuts out the part of each weight buffer that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dims
from ..isa.dtypes import BLOCKS
from .checkpoint import Rows


def shard(whole: NDArray[np.generic], buffer: Buffer, dims: Dims) -> NDArray[np.generic]:
    """Return the part of a weight buffer (of one layer) that rank `dims.rank` holds. The result is a
    view of `whole` if the part is contiguous.

    `whole` is the buffer that a single rank (tp = 1) holds. The result has the shape that BUFFERS declares for `dims`.
    """
    if dims.tp == 1:
        return whole
    ranges, columns = _share(buffer, dims)
    if ranges is not None:
        flat = whole.reshape(-1, whole.shape[-1]) if BUFFERS[buffer].matrix else whole.reshape(-1)
        parts = [flat[first : first + count] for first, count in ranges]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        whole = whole.reshape(BUFFERS[buffer].shape(dims, 0))
    return whole if columns is None else whole[:, columns[0] : sum(columns)]


def shard_rows(whole: Sequence[Rows], buffer: Buffer, dims: Dims) -> list[Rows]:
    """Like `shard`, for rows in the types in which they are stored. Raises MegakernelError if a
    rank's part begins or ends inside a quantised block.
    """
    ranges, columns = _share(buffer, dims) if dims.tp > 1 else (None, None)
    if ranges is not None:
        whole = [part for chosen in ranges for part in _cut(whole, *chosen)]
    return list(whole) if columns is None else [_columns(part, buffer, *columns) for part in whole]


def _share(buffer: Buffer, dims: Dims) -> tuple[list[tuple[int, int]] | None, tuple[int, int] | None]:
    """Return two values for rank `dims.rank`: the ranges (first, count) of the buffer's rows that the
    rank holds, and the range (first, count) of the columns.

    If a buffer has several matrices, their rows are numbered consecutively. A value of None stands
    for all rows or all columns.
    """
    d = dims
    match buffer:
        case Buffer.W_QKV | Buffer.B_QKV:
            q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
            first_q, first_kv = d.first_head * d.head_dim, d.first_kv_head * d.head_dim
            return [(first_q, d.q_cols), (q + first_kv, d.kv_cols), (q + kv + first_kv, d.kv_cols)], None
        case Buffer.W_O if not d.replicated_o:
            return None, (d.first_head * d.head_dim, d.q_cols)
        case Buffer.W_GATE_UP | Buffer.B_GATE_UP:
            return [(d.first_ffn, d.rank_ffn), (d.ffn + d.first_ffn, d.rank_ffn)], None
        case Buffer.W_DOWN:
            return None, (d.first_ffn, d.rank_ffn)
        case Buffer.LM_HEAD:
            return [(d.first_vocab, d.rank_vocab)], None
    return None, None


def _cut(whole: Sequence[Rows], first: int, count: int) -> list[Rows]:
    """Rows [first, first + count)."""
    out, begin = [], 0
    for dtype, data in whole:
        part = data[max(first - begin, 0) : max(first + count - begin, 0)]
        out += [Rows(dtype, part)] if len(part) else []
        begin += len(data)
    return out


def _columns(part: Rows, buffer: Buffer, first: int, count: int) -> Rows:
    dtype, data = part
    if count and dtype.quantised and first % BLOCKS[dtype].weights:
        raise MegakernelError(
            f"cannot divide {buffer.name} in {dtype.name.lower()} among ranks: a part would begin inside a block of "
            f"{BLOCKS[dtype].weights} weights"
        )
    begin = dtype.row_bytes(first)
    return Rows(dtype, data[:, begin : begin + dtype.row_bytes(count)])
