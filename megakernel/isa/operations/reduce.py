"""REDUCE adds partial sums. All ranks' matmuls have stored them on the rank that keeps the rows' residual."""

from __future__ import annotations

from ..access import Access, Columns, Kind
from ..buffers import given
from ..context import Context
from ..dims import Dims
from ..dtypes import Dtype
from ..opcodes import Result
from ..phases import Phase
from .spec import Cut, OperationSpec, activations, box, partial_sums, summed_weights, tile, vector, weight_rows, work


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    rows = [d.reduce_row(rank, c["row"]) for rank in range(p.ranks(d.split))]
    sums = [Access(given(p.inputs), Kind.READ, row, row + c["rows"], *tile(c)) for row in rows]
    return [*sums, box(given(p.output), Kind.WRITE if p.result is Result.STORED else Kind.UPDATE, c, tile(c))]


def _reduce(c: Context, row: int, rows: int, col: int, cols: int) -> None:
    columns = slice(col, col + cols)
    total, *others = (
        c.read(c.inputs, (c.reduce_rows(k, row, rows), columns)) for k in range(c.phase.ranks(c.dims.split))
    )
    for partial in others:
        total = total + partial
    at = slice(row, row + rows), columns
    total = c.biased(total, columns)
    c.write(c.output, at, total if c.phase.result is Result.STORED else c.read(c.output, at) + total)


REDUCE = OperationSpec(
    "adds all ranks' partial sums: output[r] += (inputs[0][r] + inputs[1][r] + ..) + bias, in float32 and in rank "
    "order; inputs[k] comes from rank k, and only ranks that have a part of `weights` count. If the phase's result is "
    "STORED, output[r] = the sum",
    Cut.RUNS,  # runs of whole rows, because the norm that follows needs all columns of a row
    _accesses,
    cost=lambda p, c, d: work(c, vector=1.0 * c["rows"] * c["cols"] * p.ranks(d.split)),
    buffers=lambda p, d: {
        "weights": summed_weights(p, d),
        "inputs": partial_sums(d, weight_rows(p, d)),
        "output": activations(d.bucket.tokens, weight_rows(p, d), Dtype.F32),
        "bias": vector(weight_rows(p, d)),
    },
    execute=_reduce,
    results=(Result.NONE, Result.STORED),
)
