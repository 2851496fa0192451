"""The seam between files of weights and backends: one tensor at a time, in the instruction set's own layout."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import Buffer, Dtype
from .config import LlamaConfig


class Checkpoint(Protocol):
    """Weights of one model. `dtype` is the type its matrices are stored in, or the nearest that is computed in."""

    name: str
    config: LlamaConfig
    dtype: Dtype

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        """One weight buffer (of one layer where layered) as `megakernel.isa.buffers` shapes it.

        Float buffers with a declared type come in it whatever `dtype` says; bfloat16 comes as uint16. q and k
        rows are in the interleaved RoPE order. Absent biases are zeros.
        """
        ...
