"""Whole weights of a checkpoint as arrays."""

from typing import Any

from numpy.typing import NDArray

from megakernel.isa import Buffer, Dtype, Split, weight_shape
from megakernel.model.checkpoint import Checkpoint, array_of


def loaded(checkpoint: Checkpoint, buffer: Buffer, layer: int = 0, dtype: Dtype = Dtype.F32) -> NDArray[Any]:
    """Return a weight buffer in the shape that BUFFERS declares. Matrices are in `dtype`, and vectors in float32."""
    split = Split(checkpoint.config.sizes(dtype))
    return array_of(checkpoint, buffer, layer, split).reshape(weight_shape(buffer, split))
