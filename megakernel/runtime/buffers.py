"""Allocation of what is not a weight: activations, state and outputs in the row-major layout of BUFFERS."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, Buffer, Dims


def allocate(buffer: Buffer, dims: Dims, pages: int) -> NDArray[np.generic]:
    """A zeroed array in the buffer's dtype (bfloat16 as uint16); layered buffers have the layer axis in front."""
    spec = BUFFERS[buffer]
    layers = (dims.layers,) if spec.layered else ()
    return np.zeros(layers + spec.shape(dims, pages), dtype=spec.resolve_dtype(dims).numpy)
