"""NORM normalises rows by their root mean square."""

from __future__ import annotations

import numpy as np

from ..access import EVERY, OWN, Access, Columns, Index, Kind
from ..buffers import Buffer, given
from ..context import F32, Context, rms_norm
from ..dims import Dims
from ..dtypes import Dtype
from ..opcodes import Result, Rows
from ..phases import Phase
from .matmul import RESULTS
from .spec import Contents, Cut, OperationSpec, activations, box, contents, vector, work


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    inputs, output = given(p.inputs), given(p.output)
    if p.result is Result.HEADS:
        own = {**c, "col": np.zeros_like(c["row"]), "cols": np.full_like(c["row"], d.split.qkv_cols)}
        return [box(inputs, Kind.READ, c, (0, d.split.qkv_rows)), *RESULTS[p.result].accesses(p, own, d)]
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


def _norm(c: Context, row: int, rows: int) -> None:
    d = c.dims

    def normed(x: F32) -> F32:
        return x if c.phase.weights is None else rms_norm(x, c.weights(), d.model.rms_eps)

    r = slice(row, row + rows)
    if c.phase.result is Result.HEADS:
        _store_heads(c, row, c.read(c.inputs, r))
        return
    if c.phase.result is Result.RESIDUAL:
        c.write(c.output, r, c.read(c.output, r) + normed(c.read(c.inputs, r)))
        return
    ranks = (d.split.rank,) if d.split.replicated_residual else range(d.split.tp)
    if c.phase.rows is not Rows.LOGIT:
        c.store(c.output, ranks, r, normed(c.read(c.inputs, r)))
        return
    for i in range(row, row + rows):
        source = c.table.logit_rows[i]
        if d.split.rank in d.owners(max(source, 0)):
            x = c.read(c.inputs, source) if source >= 0 else np.zeros(c.phase.inner(d.split), np.float32)
            c.store(c.output, ranks, i, normed(x))


def _store_heads(c: Context, row: int, qkv: F32) -> None:
    """Normalise rows of q and of k, each over all heads, and store the heads that the rank has."""
    split, size, scales = c.dims.split, c.dims.model.head_dim, c.weights()
    heads, kv_heads = c.dims.model.heads, c.dims.model.kv_heads
    q, k, v = np.split(qkv, [heads * size, (heads + kv_heads) * size], axis=1)
    q, k = (rms_norm(x, w.ravel(), c.dims.model.rms_eps) for x, w in ((q, scales[:heads]), (k, scales[heads:])))
    first, first_kv = split.first_head * size, split.first_kv_head * size
    own = [q[:, first : first + split.q_cols], *(x[:, first_kv : first_kv + split.kv_cols] for x in (k, v))]
    RESULTS[Result.HEADS].store(c, row, 0, np.concatenate(own, axis=1))


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    if p.result is Result.HEADS:
        return {
            "weights": vector(d.model.heads + d.model.kv_heads, d.model.head_dim),
            "inputs": activations(d.bucket.tokens, d.split.qkv_rows, Dtype.F32),
            "output": contents(Buffer.Q, d),
        }
    rows, inner = d.bucket.logit_rows if p.rows is Rows.LOGIT else d.bucket.tokens, p.inner(d.split)
    return {
        **({} if p.weights is None else {"weights": vector(inner)}),
        "inputs": activations(d.bucket.tokens, inner, Dtype.F32),
        "output": activations(rows, inner, Dtype.F32 if p.result is Result.RESIDUAL else None),
    }


NORM = OperationSpec(
    "RMS norm: output[r] = inputs[r] / sqrt(mean(inputs[r]^2) + eps) * weights, rounded once. If only one rank keeps a "
    "row's residual, it computes the norm and stores it on every rank. Before the LM head, output[i] is the norm of "
    "inputs[logit_rows[i]]. If the phase's result is RESIDUAL, the norm is added to output[r] instead. If it is HEADS, "
    "inputs[r] are q, k and v of all heads; q and k are normalised, each over all heads, and stored as by a matmul",
    Cut.RUNS,
    _accesses,
    cost=lambda p, c, d: work(
        c, vector=4.0 * c["rows"] * (d.split.qkv_rows if p.result is Result.HEADS else p.inner(d.split))
    ),
    buffers=_buffers,
    execute=_norm,
    rows=lambda p: (Rows.OWN,) if p.result is Result.RESIDUAL else (Rows.EVERY, Rows.OWN, Rows.LOGIT),
    results=(Result.NONE, Result.RESIDUAL, Result.HEADS),
)
