"""ROPE computes the angles of rotary position embeddings, which matmuls with the result HEADS apply."""

from __future__ import annotations

import numpy as np

from ..access import Access, Columns, Kind
from ..buffers import given
from ..context import Context
from ..dims import Dims
from ..dtypes import Dtype
from ..phases import Phase
from .spec import Contents, Cost, Cut, OperationSpec, activations, box, vector, work


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [box(given(p.output), Kind.WRITE, c, (0, d.head_dim))]


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    return work(c, vector=2.0 * c["rows"] * d.head_dim)


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    return {"weights": vector(d.head_dim // 2), "output": activations(d.tokens, d.head_dim, Dtype.F32)}


def _execute(c: Context, row: int, rows: int) -> None:
    r = slice(row, row + rows)
    angle = c.table.positions[r].astype(np.float32)[:, None] * c.weights()
    c.write(c.output, r, np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(rows, -1))


ROPE = OperationSpec(
    "output[r] = cos(a) and sin(a) interleaved, where a = (position of row r) * weights, in float32",
    Cut.RUNS,
    _accesses,
    _cost,
    _buffers,
    _execute,
)
