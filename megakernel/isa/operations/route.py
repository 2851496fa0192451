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
from ..dims import Dims, ModelSizes
from ..phases import Phase
from .spec import Cost, Cut, OperationSpec, activations, box, contents, vector, weights, work


def chosen(logits: F32, model: ModelSizes, bias: F32 | None = None) -> tuple[NDArray[np.intp], F32]:
    """Return the experts that a router chooses for each row, and their weights. An expert's score is the softmax or the
    sigmoid of its logit. Its weight is the score, divided by the sum of the chosen scores if the model says so. The
    experts with the largest logits are chosen or, if there is a `bias`, those with the largest sums of score and bias.
    If two are equal, the lower number comes first. NaN counts as -infinity, so that no expert is chosen twice."""
    logits = np.where(np.isnan(logits), -np.inf, logits)
    with np.errstate(invalid="ignore"):
        every = _sigmoid(logits) if model.sigmoid_routes else np.exp(logits - logits.max(axis=1, keepdims=True))
    whole = np.float32(1) if model.sigmoid_routes else every.sum(axis=1, keepdims=True)
    order = logits if bias is None else every / whole + bias
    experts = np.argsort(-order, axis=1, kind="stable")[:, : model.experts_per_token - model.shared_experts]
    best: F32 = np.take_along_axis(every, experts, axis=1)
    return experts, best / (best.sum(axis=1, keepdims=True) if model.normalised_routes else whole)


def _sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        out: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return out


def _route(c: Context, row: int, rows: int) -> None:
    m, r = c.dims.model, slice(row, row + rows)
    experts = np.tile(np.arange(m.experts_per_token), (rows, 1))
    shares = np.ones(experts.shape, np.float32)
    if c.layer >= m.dense_layers:
        own = m.experts_per_token - m.shared_experts
        logits = c.products(c.read(c.inputs, r), 0, 0, m.router_rows)
        bias = c.read(given(c.phase.bias)) if m.choice_bias else None
        logits = logits if m.choice_bias else c.biased(logits, ...)
        experts[:, :own], weights = chosen(logits[:, : m.routed_experts], m, bias)
        experts[:, own:] += m.routed_experts - own
        shares[:, :own] = weights * np.float32(m.route_scale)
        if m.shared_gate:
            shares[:, own:] = _sigmoid(logits[:, m.routed_experts :])
    c.write(c.output, r, experts)
    c.write(Buffer.ROUTE_WEIGHTS, r, shares)


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    """Return the cost of instructions. Only the one that begins at row 0 counts as reading the weights from memory."""
    matrix = d.model.router_rows * p.inner(d.split)
    bytes_ = matrix * p.stored_bits(d.model) / 8
    return work(c, matrix=2.0 * c["rows"] * matrix, memory=np.where(c["row"] == 0, bytes_, 0.0))


ROUTE = OperationSpec(
    "chooses experts: t = inputs[r] weights^T + bias; output[r] = the numbers of the experts with the largest t, best "
    "first, then the shared experts. ROUTE_WEIGHTS[r] = the softmax of t at these experts, divided by its sum if the "
    "model says so. A model may have sigmoids in place of the softmax, a bias for the choice only, and a factor of the "
    "weights. In a dense layer, each row has the first experts, with weights of 1",
    Cut.RUNS,
    accesses=lambda p, c, d: [
        box(given(p.inputs), Kind.READ, c, (0, p.inner(d.split))),
        box(given(p.output), Kind.WRITE, c, (0, d.model.experts_per_token)),
        box(Buffer.ROUTE_WEIGHTS, Kind.WRITE, c, (0, d.model.experts_per_token)),
    ],
    cost=_cost,
    buffers=lambda p, d: {
        "weights": weights(d.model.router_rows, p.inner(d.split)),
        "bias": vector(d.model.routed_experts if d.model.choice_bias else d.model.router_rows),
        "inputs": activations(d.bucket.tokens, p.inner(d.split)),
        "output": contents(Buffer.ROUTES, d),
    },
    execute=_route,
)
