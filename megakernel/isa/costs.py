"""The arithmetic and memory traffic of a phase's instructions, as arrays with one element per instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import Columns
from .buffers import BUFFERS, Buffer
from .dims import Dims
from .dtypes import Dtype
from .operations import Operation, Rows
from .phases import Phase


@dataclass(frozen=True)
class Cost:
    """The work of each instruction, as float64 columns. A multiply-add counts as two FLOPs.

    `memory_bytes` counts the bytes of weights, KV cache and embeddings that must be read from main
    memory once per step, even with perfect caches. It assumes that activations stay in caches.
    Attention's cost depends on the step table and is zero here; `attention_cost` gives it for a
    context length. Bytes sent to other ranks follow from the accesses (`link_bytes`).
    """

    matrix_flops: NDArray[np.float64]
    vector_flops: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


def cost(phase: Phase, columns: Columns, dims: Dims) -> Cost:
    """Return the work of the instructions of `phase` on rank `dims.rank`. `columns` has their operands."""
    return _COSTS[phase.operation](phase, columns, dims)


def itemsize(dims: Dims) -> int:
    """Return the bytes of an element in the compute dtype."""
    return Dtype(dims.dtype).itemsize


def kv_bytes(dims: Dims) -> int:
    """Return the number of bytes that K and V of one token and one KV head take in the cache."""
    return 2 * dims.kv_row * BUFFERS[Buffer.K_CACHE].resolve_dtype(dims).itemsize


def _cost(
    like: NDArray[Any],
    matrix: NDArray[Any] | float = 0.0,
    vector: NDArray[Any] | float = 0.0,
    memory: NDArray[Any] | float = 0.0,
) -> Cost:
    def col(v: NDArray[Any] | float) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(v, dtype=np.float64), like.shape)

    return Cost(col(matrix), col(vector), col(memory))


def weight_bytes(phase: Phase, cols: NDArray[Any], dims: Dims) -> NDArray[np.float64]:
    """Return the number of bytes that the weights for `cols` output columns of a matmul take in memory."""
    return cols.astype(np.float64) * (phase.matrices(dims) * phase.inner(dims) * phase.stored_bits(dims) / 8)


def _matmul(p: Phase, c: Columns, d: Dims) -> Cost:
    """Return the cost of matmul tiles. Only tiles that begin at the rank's first row read weights from memory; all
    other tiles find the weights in a cache. A norm applied to the inputs is computed once per tile.
    """
    # The positions of the tiles' first rows among the rank's rows.
    place = d.reduce_place(c["row"]) if p.rows is Rows.OWN else c["row"]
    products = c["cols"].astype(np.float64) * p.matrices(d) * p.inner(d)
    return _cost(
        c["row"],
        matrix=2.0 * c["rows"] * products,
        vector=0.0 if p.norm is None else 4.0 * c["rows"] * p.inner(d),
        memory=np.where(place == 0, weight_bytes(p, c["cols"], d), 0.0),
    )


def attention_cost(dims: Dims, row_kv_heads: int, kv_tokens: float) -> tuple[float, float]:
    """Return (FLOPs, KV bytes) of one attention item. `row_kv_heads` is the product of the item's
    query rows and KV heads. Each row attends to `kv_tokens` tokens.

    FLOPs = 4 x query heads x head_dim x tokens: two products (QK and PV), two FLOPs each. KV bytes
    count one read per row.
    """
    flops = 4.0 * row_kv_heads * dims.group_size * dims.head_dim * kv_tokens
    return flops, row_kv_heads * kv_tokens * kv_bytes(dims)


def _nothing(p: Phase, c: Columns, d: Dims) -> Cost:
    """Return the cost of phases that do no work, or whose work depends on the step table."""
    return _cost(next(iter(c.values()), np.zeros(0)))


_COSTS: dict[Operation, Callable[[Phase, Columns, Dims], Cost]] = {
    Operation.JOIN: _nothing,
    Operation.DRAIN: _nothing,
    Operation.GATHER: lambda p, c, d: _cost(c["row"], memory=c["rows"] * p.inner(d) * p.stored_bits(d) / 8),
    Operation.ROPE: lambda p, c, d: _cost(c["row"], vector=2.0 * c["rows"] * d.head_dim),
    Operation.NORM: lambda p, c, d: _cost(c["row"], vector=4.0 * c["rows"] * p.inner(d)),
    Operation.MATMUL: _matmul,
    Operation.ATTENTION: _nothing,
    Operation.REDUCE: lambda p, c, d: _cost(c["row"], vector=1.0 * c["rows"] * c["cols"] * p.ranks(d)),
    Operation.SAMPLE: lambda p, c, d: _cost(c["row"], vector=8.0 * c["rows"] * d.vocab),
}
