"""COMBINE adds the outputs of a token's experts, each multiplied by the routing weight that ROUTE has computed."""

from __future__ import annotations

import numpy as np

from ..access import Access, Columns, Kind
from ..buffers import Buffer, given
from ..context import Context
from ..dims import Dims
from ..opcodes import Result
from ..phases import Phase
from .experts import here, share
from .matmul import RESULTS
from .spec import Contents, Cut, OperationSpec, activations, box, summed_weights, work


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    hidden = d.model.hidden
    whole = {**c, "col": np.zeros_like(c["row"]), "cols": np.full_like(c["row"], hidden)}
    return [
        box(Buffer.ROUTES, Kind.READ, c, (0, d.model.experts_per_token)),
        box(Buffer.ROUTE_WEIGHTS, Kind.READ, c, (0, d.model.experts_per_token)),
        box(given(p.inputs), Kind.READ, c, (0, d.places * hidden), share=share(d)),
        *RESULTS[p.result].accesses(p, whole, d),
    ]


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    return {
        "weights": summed_weights(p, d),
        "inputs": activations(d.bucket.tokens * d.model.experts_per_token, d.model.hidden),
        "output": RESULTS[p.result].output(d.model.hidden, d),
    }


def _combine(c: Context, row: int, rows: int) -> None:
    count = c.dims.model.experts_per_token
    results = c.read(c.inputs, slice(row * count, (row + rows) * count)).reshape(rows, count, -1)
    scale, own = c.read(Buffer.ROUTE_WEIGHTS, slice(row, row + rows)), here(c, row, rows) >= 0
    total = np.zeros_like(results[:, 0])
    for j in range(count):
        total[own[:, j]] += (results[:, j] * scale[:, j, None])[own[:, j]]
    RESULTS[c.phase.result].store(c, row, 0, total)


COMBINE = OperationSpec(
    "adds the results of a row's k experts, except experts of other ranks: t = ROUTE_WEIGHTS[r][0] * inputs[k r] + "
    "ROUTE_WEIGHTS[r][1] * inputs[k r + 1] + .., in float32 and in this order; `weights` are the experts' matrices. t "
    "is added to the residual if the phase's result is RESIDUAL; if it is PARTIAL, t is one rank's partial sum",
    Cut.RUNS,
    _accesses,
    cost=lambda p, c, d: work(c, vector=2.0 * c["rows"] * d.model.hidden * d.model.experts_per_token),
    buffers=_buffers,
    execute=_combine,
    results=(Result.RESIDUAL, Result.PARTIAL),
)
