"""REDUCE adds the partial sums that the ranks' matmuls have stored."""

from __future__ import annotations

from ..access import Access, Columns, Kind
from ..buffers import given
from ..context import Context
from ..dims import Dims
from ..dtypes import Dtype
from ..phases import Phase
from .spec import (
    Contents,
    Cost,
    Cut,
    OperationSpec,
    activations,
    box,
    partial_sums,
    tile,
    vector,
    weight_shape,
    weights,
    work,
)


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    rows = [d.reduce_row(rank, c["row"]) for rank in range(p.ranks(d))]
    slots = [Access(given(p.inputs), Kind.READ, row, row + c["rows"], *tile(c)) for row in rows]
    return [*slots, box(given(p.output), Kind.UPDATE, c, tile(c))]


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    return work(c, vector=1.0 * c["rows"] * c["cols"] * p.ranks(d))


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    width, inner = weight_shape(p, d)
    return {
        "weights": weights(width, inner),
        "inputs": partial_sums(d, width),
        "output": activations(d.tokens, width, Dtype.F32),
        "bias": vector(width),
    }


def _execute(c: Context, row: int, rows: int, col: int, cols: int) -> None:
    columns = slice(col, col + cols)
    total, *others = (c.read(c.inputs, (c.reduce_rows(k, row, rows), columns)) for k in range(c.phase.ranks(c.dims)))
    for partial in others:
        total = total + partial
    r = slice(row, row + rows), columns
    c.write(c.output, r, c.read(c.output, r) + c.biased(total, columns))


REDUCE = OperationSpec(
    "output[r] += (inputs[0][r] + inputs[1][r] + ..) + bias, in float32 and in rank order; inputs[k] is rank k's "
    "partial sum, for all ranks that have a part of `weights`",
    # A reduction sums whole rows, because the norm that follows needs every column of a row.
    Cut.RUNS,
    _accesses,
    _cost,
    _buffers,
    _execute,
)
