"""A rank's part of a checkpoint."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..isa import Buffer, Dims


def shard(whole: NDArray[np.generic], buffer: Buffer, dims: Dims) -> NDArray[np.generic]:
    """The part of a weight buffer (of one layer) that rank `dims.rank` holds, a view where its parts adjoin.

    `whole` is what one rank alone would hold; the result has the shape that BUFFERS declares for `dims`.
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
            first = d.first_head * d.head_dim
            return whole[:, first : first + d.q_cols]
        case Buffer.W_GATE_UP | Buffer.B_GATE_UP | Buffer.W_DOWN:
            return whole[:, ffn]
        case Buffer.LM_HEAD:
            return whole[d.first_vocab : d.first_vocab + d.rank_vocab]
    return whole
