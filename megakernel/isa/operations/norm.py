"""NORM normalises rows by their root mean square."""

from __future__ import annotations

import numpy as np

from ..access import EVERY, OWN, Access, Columns, Index, Kind
from ..buffers import given
from ..context import F32, Context
from ..dims import Dims
from ..dtypes import Dtype
from ..opcodes import Result, Rows
from ..phases import Phase
from .spec import Cut, OperationSpec, activations, box, vector, work


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    inputs, output = given(p.inputs), given(p.output)
    if p.result is Result.RESIDUAL:
        whole = (0, d.model.hidden)
        return [box(inputs, Kind.READ, c, whole), box(output, Kind.UPDATE, c, whole)]
    rank = OWN if d.split.replicated_residual or d.split.tp == 1 else EVERY  # a row is normalised once, for all ranks
    if p.rows is not Rows.LOGIT:
        whole = (0, p.inner(d.split))
        return [box(inputs, Kind.READ, c, whole), box(output, Kind.WRITE, c, whole, rank)]
    row = c["row"]
    zero = np.zeros_like(row)
    inner = zero + p.inner(d.split)
    index = Index.NONE if rank == OWN else Index.LOGIT_OWNER
    return [
        Access(inputs, Kind.READ, zero, zero + d.bucket.tokens, zero, inner, Index.LOGIT_ROW),
        Access(output, Kind.WRITE, row, row + c["rows"], zero, inner, index, rank),
    ]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    scale: F32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / scale * weight


def _norm(c: Context, row: int, rows: int) -> None:
    d = c.dims
    if c.phase.result is Result.RESIDUAL:
        r = slice(row, row + rows)
        c.write(c.output, r, c.read(c.output, r) + rms_norm(c.read(c.inputs, r), c.weights(), d.model.rms_eps))
        return
    ranks = (d.split.rank,) if d.split.replicated_residual else range(d.split.tp)
    if c.phase.rows is not Rows.LOGIT:
        r = slice(row, row + rows)
        c.store(c.output, ranks, r, rms_norm(c.read(c.inputs, r), c.weights(), d.model.rms_eps))
        return
    for i in range(row, row + rows):
        source = c.table.logit_rows[i]
        if d.split.rank in d.owners(max(source, 0)):
            x = c.read(c.inputs, source) if source >= 0 else np.zeros(c.phase.inner(d.split), np.float32)
            c.store(c.output, ranks, i, rms_norm(x, c.weights(), d.model.rms_eps))


NORM = OperationSpec(
    "RMS norm: output[r] = inputs[r] / sqrt(mean(inputs[r]^2) + eps) * weights, rounded once. If only one rank keeps a"
    " row's residual, it computes the norm and stores it on every rank. Before the LM head, only rows that get logits "
    "are read. If the phase's result is RESIDUAL, the norm is not rounded, but added to output[r] on the same rank",
    Cut.RUNS,
    _accesses,
    cost=lambda p, c, d: work(c, vector=4.0 * c["rows"] * p.inner(d.split)),
    buffers=lambda p, d: {
        "weights": vector(p.inner(d.split)),
        "inputs": activations(d.bucket.tokens, p.inner(d.split), Dtype.F32),
        "output": activations(
            d.bucket.logit_rows if p.rows is Rows.LOGIT else d.bucket.tokens,
            p.inner(d.split),
            Dtype.F32 if p.result is Result.RESIDUAL else None,
        ),
    },
    execute=_norm,
    rows=lambda p: (Rows.OWN,) if p.result is Result.RESIDUAL else (Rows.EVERY, Rows.OWN, Rows.LOGIT),
    results=(Result.NONE, Result.RESIDUAL),
)
