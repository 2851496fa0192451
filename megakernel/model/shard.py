"""A rank's part of a checkpoint."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Buffer, Dims, Dtype


def shard(whole: NDArray[np.generic], buffer: Buffer, dims: Dims, dtype: Dtype | None = None) -> NDArray[np.generic]:
    """The part of a weight buffer (of one layer) that rank `dims.rank` holds, a view where its parts adjoin.

    `whole` is what one rank alone would hold, in `dtype` where that is quantised; the result has the shape that BUFFERS
    declares for `dims`. Raises MegakernelError where a shard would cut a quantised block.
    """
    d = dims
    if d.tp == 1:
        return whole
    ffn = slice(d.first_ffn, d.first_ffn + d.rank_ffn)
    match buffer:
        case Buffer.W_QKV | Buffer.B_QKV:
            q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
            first_q, first_kv = d.first_head * d.head_dim, d.first_kv_head * d.head_dim
            starts = ((first_q, d.q_cols), (q + first_kv, d.kv_cols), (q + kv + first_kv, d.kv_cols))
            return np.concatenate([whole[start : start + rows] for start, rows in starts])
        case Buffer.W_O if not d.replicated_o:
            return _columns(whole, buffer, dtype, d.first_head * d.head_dim, d.q_cols)
        case Buffer.W_GATE_UP | Buffer.B_GATE_UP:
            return whole[:, ffn]
        case Buffer.W_DOWN:
            return _columns(whole, buffer, dtype, d.first_ffn, d.rank_ffn)
        case Buffer.LM_HEAD:
            return whole[d.first_vocab : d.first_vocab + d.rank_vocab]
    return whole


def _columns(
    whole: NDArray[np.generic], buffer: Buffer, dtype: Dtype | None, first: int, count: int
) -> NDArray[np.generic]:
    """Columns [first, first + count) of a matrix."""
    if dtype is None or not dtype.quantised:
        return whole[:, first : first + count]
    begin = dtype.row_bytes(first)
    if count and dtype.row_bytes(first + 1) == begin:
        raise MegakernelError(
            f"cannot share {buffer.name} in {dtype.name.lower()}: a rank's part begins inside a block"
        )
    return whole[:, begin : begin + dtype.row_bytes(count)]
