"""Computes whether a step fits into a device's memory, and how many sequences would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..isa import BUFFERS, Dims, Space, kv_bytes


@dataclass(frozen=True)
class Fit:
    """Whether a step fits into memory. The sizes are those of the rank that needs most; every rank has `memory_bytes`.
    `sequences_at_most` is how many sequences of the same length would fit."""

    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    memory_bytes: float
    sequences_at_most: int

    @property
    def needed_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes


def memory_fit(ranks: Sequence[Dims], weight_bytes: float, memory_bytes: float, sequences: int, context: int) -> Fit:
    """Return the memory that a step needs on the rank that needs most: `weight_bytes`, activations, and a KV cache for
    `sequences` sequences of `context` tokens each. `ranks` are the sizes as each rank sees them."""
    one = max(float(d.model.layers * d.split.rank_kv_heads * context * kv_bytes(d.model)) for d in ranks)
    activations = max(_bytes(d, Space.ACTIVATION) + _bytes(d, Space.OUTPUT) for d in ranks)
    room = memory_bytes - weight_bytes - activations
    return Fit(weight_bytes, one * sequences, activations, memory_bytes, max(0, int(room // one)))


def _bytes(dims: Dims, space: Space) -> float:
    specs = (spec for spec in BUFFERS.values() if spec.space is space)
    return float(sum(math.prod(s.shape(dims, 0)) * s.resolve_dtype(dims.model).itemsize for s in specs))
