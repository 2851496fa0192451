"""GATHER looks up the embeddings of tokens."""

from __future__ import annotations

from ..access import Access, Columns, Kind
from ..buffers import Buffer, given
from ..context import Context
from ..dims import Dims
from ..dtypes import Dtype
from ..phases import Phase
from .spec import Contents, Cost, Cut, OperationSpec, activations, box, weight_shape, weights, work


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    return [box(given(p.output), Kind.WRITE, c, (0, p.inner(d)))]


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    return work(c, memory=c["rows"] * p.inner(d) * p.stored_bits(d) / 8)


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    _, inner = weight_shape(p, d)
    return {"weights": weights(d.vocab, inner), "output": activations(d.tokens, inner, Dtype.F32)}


def _execute(c: Context, row: int, rows: int) -> None:
    r = slice(row, row + rows)
    history = c.buffer(Buffer.HISTORY)
    pairs = zip(c.table.token_ids[r], c.table.positions[r], strict=True)
    c.write(c.output, r, c.weights([token if token >= 0 else history[-1 - token, at] for token, at in pairs]))


GATHER = OperationSpec("output[r] = weights[token id of row r]", Cut.RUNS, _accesses, _cost, _buffers, _execute)
