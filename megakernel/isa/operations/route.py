"""ROUTE chooses the experts of each row.

For each token row, it writes the numbers of the row's experts to ROUTES, the best first, and their weights to
ROUTE_WEIGHTS. A row's experts depend only on the row itself. Therefore its results do not depend on the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..access import Columns, Kind
from ..buffers import Buffer, given
from ..context import F32, Context
from ..dims import Dims
from ..phases import Phase
from .spec import Cost, Cut, OperationSpec, activations, box, contents, vector, weights, work


def chosen(logits: F32, count: int, *, normalised: bool) -> tuple[NDArray[np.intp], F32]:
    """Return the `count` experts of each row with the largest logits, and the experts' weights. The weights are the
    softmax of all logits; if `normalised`, they are divided by their sum. Of experts with equal logits, the lower
    number comes first. NaN counts as -infinity, so that no expert is chosen twice."""
    logits = np.where(np.isnan(logits), -np.inf, logits)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    with np.errstate(invalid="ignore"):
        every = np.exp(logits - logits.max(axis=1, keepdims=True))
    best: F32 = np.take_along_axis(every, experts, axis=1)
    return experts, best / (best if normalised else every).sum(axis=1, keepdims=True)


def _route(c: Context, row: int, rows: int) -> None:
    model, r = c.dims.model, slice(row, row + rows)
    logits = c.biased(c.products(c.read(c.inputs, r), 0, 0, model.experts), ...)
    experts, shares = chosen(logits, model.experts_per_token, normalised=bool(model.normalised_routes))
    c.write(c.output, r, experts)
    c.write(Buffer.ROUTE_WEIGHTS, r, shares)


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    """Return the cost of runs of rows. Only the run that begins at row 0 reads the weights from memory."""
    matrix = d.model.experts * p.inner(d.split)
    bytes_ = matrix * p.stored_bits(d.model) / 8
    return work(c, matrix=2.0 * c["rows"] * matrix, memory=np.where(c["row"] == 0, bytes_, 0.0))


ROUTE = OperationSpec(
    "chooses experts: t = inputs[r] weights^T + bias; output[r] = the numbers of the experts with the largest t, best "
    "first. ROUTE_WEIGHTS[r] = the softmax of t at these experts, divided by its sum if the model says so",
    Cut.RUNS,
    accesses=lambda p, c, d: [
        box(given(p.inputs), Kind.READ, c, (0, p.inner(d.split))),
        box(given(p.output), Kind.WRITE, c, (0, d.model.experts_per_token)),
        box(Buffer.ROUTE_WEIGHTS, Kind.WRITE, c, (0, d.model.experts_per_token)),
    ],
    cost=_cost,
    buffers=lambda p, d: {
        "weights": weights(d.model.experts, p.inner(d.split)),
        "bias": vector(d.model.experts),
        "inputs": activations(d.bucket.tokens, p.inner(d.split)),
        "output": contents(Buffer.ROUTES, d),
    },
    execute=_route,
)
