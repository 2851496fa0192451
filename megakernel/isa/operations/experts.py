"""EXPERTS multiplies rows by the matrices of the experts that ROUTE has chosen for them.

A row has k experts and therefore k rows of results, those of its best expert first. The operand `place` of an
instruction selects an expert. In small steps (see `Dims.by_expert`), place j means the j-th expert of each row. In
large steps, place e means the rank's expert e, and the instruction computes only those of its rows that have chosen
this expert. Both ways give bit-identical results.

With expert parallelism (`Split.expert_parallel`), a rank has only some of the experts. An instruction then skips rows
whose expert another rank has, COMBINE adds only the results of the rank's own experts, and the ranks' sums are added.

The routing is unknown when a program is verified. Therefore the declared accesses have columns for every place, as if
each row had results for all places, and the proof holds for any routing. In memory, a row has only k rows of results.
Two places never share a row of results within a layer, because a token row's experts all differ. The next layer may
reuse the rows of results, because ROUTE changes the routing only after all instructions of the layer have read it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..access import Access, Columns, Kind
from ..buffers import Buffer, Space, given
from ..context import F32, Context
from ..dims import Dims
from ..opcodes import Result
from ..phases import Phase
from ..record import Column
from .matmul import gated, weight_bytes
from .spec import Contents, Cost, Cut, OperationSpec, activations, box, vector, weight_rows, work


def share(d: Dims) -> float:
    """Return the fraction of a tile's rows that its instruction computes if all experts are chosen equally often."""
    return (d.model.experts_per_token if d.by_expert else d.split.rank_experts) / max(d.model.experts, 1)


def here(c: Context, row: int, rows: int) -> NDArray[np.int32]:
    """Return the experts chosen for some rows. This rank's experts count from 0; other ranks' experts are -1."""
    own = c.buffer(Buffer.ROUTES)[row : row + rows] - c.dims.split.first_expert
    return np.where((own >= 0) & (own < c.dims.split.rank_experts), own, -1)


def _places(buffer: Buffer, kind: Kind, c: Columns, d: Dims, width: int, cols: tuple[Column | int, Column]) -> Access:
    """Return an access to a buffer of experts' results, which has `width` columns for each expert. The operand `place`
    selects the expert. `cols` are the accessed columns, counted from the expert's first."""
    first = c["place"] * width
    return box(buffer, kind, c, (first + cols[0], first + cols[1]), share=share(d))


def _accesses(p: Phase, c: Columns, d: Dims) -> list[Access]:
    inner, inputs = p.inner(d.split), given(p.inputs)
    whole = np.full_like(c["row"], inner)
    return [
        box(Buffer.ROUTES, Kind.READ, c, (0, d.model.experts_per_token)),
        box(inputs, Kind.READ, c, (0, whole), share=share(d))
        if _of_tokens(p)
        else _places(inputs, Kind.READ, c, d, inner, (0, whole)),
        _places(given(p.output), Kind.WRITE, c, d, p.width(d.split), (c["col"], c["col"] + c["cols"])),
    ]


def _of_tokens(p: Phase) -> bool:
    """Whether the inputs have one row per token, used by all its experts; otherwise, one row per (token, expert)."""
    return p.result is Result.GATED


def _cost(p: Phase, c: Columns, d: Dims) -> Cost:
    """Return the cost of instructions. Each instruction reads one expert's weights. If B rows have chosen k of E
    experts each, the step counts as reading min(B k, E) experts, the maximum."""
    rows = c["rows"] * share(d)
    memory = weight_bytes(p, c["cols"], d)
    matrix = 2.0 * rows * c["cols"] * p.matrices(d.split) * p.inner(d.split)
    return work(c, matrix=matrix, memory=memory if d.by_expert else memory * rows)


def _buffers(p: Phase, d: Dims) -> dict[str, Contents]:
    width, inner = weight_rows(p, d), p.inner(d.split)
    rows = d.bucket.tokens * d.model.experts_per_token
    return {
        "weights": (Space.WEIGHT, None, (d.split.rank_experts, *((2,) if _of_tokens(p) else ()), width, inner)),
        "inputs": activations(d.bucket.tokens if _of_tokens(p) else rows, inner),
        "output": activations(rows, width),
        "bias": vector(d.split.rank_experts, *((2,) if _of_tokens(p) else ()), width),
    }


# The clipped gate: gate * sigmoid(GATE_SLOPE * gate) * (up + 1), where gate is at most GATE_LIMIT, and up lies between
# -GATE_LIMIT and GATE_LIMIT.
GATE_SLOPE, GATE_LIMIT = 1.702, 7.0


def clipped(gate: F32, up: F32) -> F32:
    """Return the clipped gate of `gate` and `up`, which have the same shape."""
    limit = np.float32(GATE_LIMIT)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # if a gate is a large negative number, exp overflows and the result is 0
        out: F32 = gate / (1 + np.exp(np.float32(-GATE_SLOPE) * gate)) * (up + 1)
    return out


def _experts(c: Context, row: int, rows: int, col: int, cols: int, place: int) -> None:
    d, routes = c.dims, here(c, row, rows)
    # For each result: its row, counted from `row`, and the index of the expert among the row's experts.
    of, nth = np.nonzero(routes == place if d.by_expert else (routes >= 0) & (np.arange(routes.shape[1]) == place))
    experts = routes[of, nth]
    token = row + of
    at = token * d.model.experts_per_token + nth  # the rows of results
    matrices = c.phase.matrices(d.split)
    for expert in np.unique(experts):
        mine = experts == expert
        a = c.read(c.inputs, token[mine] if _of_tokens(c.phase) else at[mine])
        t = [c.products(a, expert * matrices + m, col, cols) for m in range(matrices)]
        columns = slice(col, col + cols)
        if _of_tokens(c.phase):
            gate, up = (c.biased(values, (expert, m, columns)) for m, values in enumerate(t))
            out = clipped(gate, up) if d.model.clipped_gates else gated(gate, up)
        else:  # if ranks have parts of each expert, their results are added, so one rank adds the bias
            alone = d.split.rank == 0 or d.split.expert_parallel
            out = c.biased(t[0], (expert, columns)) if alone else t[0]
        c.write(c.output, (at[mine], columns), out)


EXPERTS = OperationSpec(
    "multiplies each row r by the matrices of its k experts: t = a weights[e]^T + bias[e] for j < k, where e = "
    "ROUTES[r][j]. If the phase's result is GATED, a = inputs[r] and output[k r + j] = silu(t of the first matrix) * "
    "(t of the second), or the clipped gate of gpt-oss; otherwise a = inputs[k r + j] and output[k r + j] = t. An "
    "instruction computes the pairs (r, j) with j = `place` or, in a step with more pairs than experts, those whose "
    "expert is number `place` of the rank",
    Cut.PLACES,
    _accesses,
    _cost,
    _buffers,
    _experts,
    results=(Result.GATED, Result.NONE),
    paged=True,
)
