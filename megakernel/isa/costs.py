"""The work of each kind of instruction, for a whole column of instructions at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import Columns
from .dims import Dims
from .dtypes import Dtype
from .pages import Matmul

Costs = Callable[[Columns, Dims], "Cost"]


@dataclass(frozen=True)
class Cost:
    """Work of each instruction, as float64 columns. FLOPs count a multiply-add as two.

    `memory_bytes` are the bytes that must come from or go to main memory once per step even with perfect
    caches: weights and KV. Activations stay in caches. Attention's cost depends on the step table and is zero
    here; `attention_cost` gives it for a context length. What goes to other ranks follows from the accesses:
    `link_bytes`.
    """

    matrix_flops: NDArray[np.float64]
    vector_flops: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


def itemsize(dims: Dims) -> int:
    """Bytes of an element in the compute dtype."""
    return Dtype(dims.dtype).itemsize


def _cost(
    like: NDArray[Any],
    matrix: NDArray[Any] | float = 0.0,
    vector: NDArray[Any] | float = 0.0,
    memory: NDArray[Any] | float = 0.0,
) -> Cost:
    def col(v: NDArray[Any] | float) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(v, dtype=np.float64), like.shape)

    return Cost(col(matrix), col(vector), col(memory))


def matmul(m: Matmul, first_row: Callable[[Dims], int] = lambda d: 0) -> Costs:
    """A tile of rows x cols outputs.

    `first_row` is the rank's first row: its tiles bring the weights, the others find them in a cache.
    """

    def cost(c: Columns, d: Dims) -> Cost:
        weights = c["cols"].astype(np.float64) * m.width * m.length(d)
        return _cost(
            c["row"],
            matrix=2.0 * c["rows"] * weights,
            memory=np.where(c["row"] == first_row(d), weights * itemsize(d), 0.0),
        )

    return cost


def attention_cost(dims: Dims, row_kv_heads: int, kv_tokens: float) -> tuple[float, float]:
    """(FLOPs, KV bytes) of one item: `row_kv_heads` = query rows x KV heads, each over `kv_tokens` tokens.

    FLOPs = 4 x query heads x head_dim x tokens (roofline: 2nP + 4nSLHh). KV bytes count each row's read once.
    """
    flops = 4.0 * row_kv_heads * dims.group_size * dims.head_dim * kv_tokens
    return flops, 2.0 * row_kv_heads * dims.head_dim * kv_tokens * itemsize(dims)


def embed(c: Columns, d: Dims) -> Cost:
    return _cost(c["row"], memory=c["rows"] * d.hidden * float(itemsize(d)))


def rope(c: Columns, d: Dims) -> Cost:
    return _cost(c["row"], vector=2.0 * c["rows"] * d.head_dim)


def norm(c: Columns, d: Dims) -> Cost:
    return _cost(c["row"], vector=4.0 * c["rows"] * d.hidden)


def reduce(ranks: Callable[[Dims], int]) -> Costs:
    return lambda c, d: _cost(c["row"], vector=1.0 * c["rows"] * c["cols"] * ranks(d))


def sample(c: Columns, d: Dims) -> Cost:
    return _cost(c["row"], vector=8.0 * c["rows"] * d.vocab)


def none(c: Columns, d: Dims) -> Cost:
    """Nothing, or what only the step table knows."""
    return _cost(next(iter(c.values()), np.zeros(0)))
