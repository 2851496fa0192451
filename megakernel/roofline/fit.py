"""Computes whether a step fits into a device's memory, and how many sequences would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..isa import BUFFERS, Dims, Space, kv_bytes


def memory_fit(
    ranks: Sequence[Dims], weight_bytes: float, memory_bytes: float, sequences: int, context: int
) -> dict[str, Any]:
    """Return the memory that a step needs on the rank that needs most: `weight_bytes`, activations, and a KV cache for
    `sequences` sequences of `context` tokens each. `ranks` has the model's and the batch's sizes on each rank.
    Every rank has `memory_bytes`. The result also says whether the step fits, and how many such sequences would fit."""
    one = max(float(d.model.layers * d.split.rank_kv_heads * context * kv_bytes(d.model)) for d in ranks)
    activations = max(_bytes(d, Space.ACTIVATION) + _bytes(d, Space.OUTPUT) for d in ranks)
    needed = weight_bytes + one * sequences + activations
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes": one * sequences,
        "activation_bytes": activations,
        "memory_bytes": memory_bytes,
        "sequences_at_most": max(0, int((memory_bytes - weight_bytes - activations) // one)),
        "needed_bytes": needed,
        "fits": needed <= memory_bytes,
    }


def _bytes(dims: Dims, space: Space) -> float:
    specs = (spec for spec in BUFFERS.values() if spec.space is space)
    return float(sum(math.prod(s.shape(dims, 0)) * s.resolve_dtype(dims.model).itemsize for s in specs))
