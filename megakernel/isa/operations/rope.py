"""ROPE computes cosines and sines for rotary position embeddings. The QKV projection rotates q and k with them."""

from __future__ import annotations

import numpy as np

from ..access import Kind
from ..buffers import given
from ..context import Context
from ..dtypes import Dtype
from .spec import Cut, OperationSpec, activations, box, vector, work


def _rope(c: Context, row: int, rows: int) -> None:
    r = slice(row, row + rows)
    frequencies, factors = c.weights()
    angle = c.table.positions[r].astype(np.float32)[:, None] * frequencies
    c.write(c.output, r, (factors[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)).reshape(rows, -1))


ROPE = OperationSpec(
    "prepares the rotations of Q and K: output[r] = cos(a) and sin(a) for each pair of elements, interleaved, each "
    "times a factor of the pair, in float32; a = (position of row r) * frequency of the pair. The weights are the "
    "frequencies, then the factors",
    Cut.RUNS,
    accesses=lambda p, c, d: [box(given(p.output), Kind.WRITE, c, (0, d.model.head_dim))],
    cost=lambda p, c, d: work(c, vector=2.0 * c["rows"] * d.model.head_dim),
    buffers=lambda p, d: {
        "weights": vector(2, d.model.head_dim // 2),
        "output": activations(d.bucket.tokens, d.model.head_dim, Dtype.F32),
    },
    execute=_rope,
)
