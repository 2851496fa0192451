"""GATHER looks up the embeddings of tokens."""

from __future__ import annotations

import numpy as np

from ..access import Kind
from ..buffers import Buffer, given
from ..context import Context
from ..dtypes import Dtype
from .spec import Cut, OperationSpec, activations, box, weights, work


def _gather(c: Context, row: int, rows: int) -> None:
    r = slice(row, row + rows)
    history = c.buffer(Buffer.HISTORY)
    pairs = zip(c.table.token_ids[r], c.table.positions[r], strict=True)
    tokens = [token if token >= 0 else history[-1 - token, at] for token, at in pairs]
    c.write(c.output, r, c.weights(tokens) * np.float32(c.dims.model.embed_scale))


GATHER = OperationSpec(
    "looks up embeddings: output[r] = weights[token id of row r] * embed_scale",
    Cut.RUNS,
    accesses=lambda p, c, d: [box(given(p.output), Kind.WRITE, c, (0, p.inner(d.split)))],
    cost=lambda p, c, d: work(c, memory=c["rows"] * p.inner(d.split) * p.stored_bits(d.model) / 8),
    buffers=lambda p, d: {
        "weights": weights(d.model.vocab, p.inner(d.split)),
        "output": activations(d.bucket.tokens, p.inner(d.split), Dtype.F32),
    },
    execute=_gather,
)
