"""Checkpoints whose matrices lie in memory in a type of their own, beside the type that is computed in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Buffer, Dtype
from .checkpoint import Checkpoint, weight_dims
from .families import forward

# What `--weights` takes; auto: the compute type.
WEIGHT_TYPES: dict[str, Dtype | None] = {"auto": None, "f32": Dtype.F32, "q8_0": Dtype.Q8_0}


def stored_as(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """`checkpoint` with the weights of its matmuls stored in the type `name`. Raises MegakernelError."""
    if name not in WEIGHT_TYPES:
        raise MegakernelError(f"cannot store weights in {name!r}: known are {', '.join(WEIGHT_TYPES)}")
    dtype = WEIGHT_TYPES[name]
    return checkpoint if dtype is None else _Stored(checkpoint, dtype)


class _Stored:
    """See `stored_as`."""

    def __init__(self, whole: Checkpoint, dtype: Dtype) -> None:
        self.name, self.config, self.dtype = whole.name, whole.config, whole.dtype
        phases = forward(whole.config, weight_dims(whole.config, whole.dtype))
        self.storage: Mapping[Buffer, Dtype] = {
            phase.weights: dtype for phase in phases if phase.is_matmul and phase.weights is not None
        }
        self._whole = whole

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        return self._whole.load(buffer, layer, dtype)
