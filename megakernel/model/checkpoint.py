"""The seam between files of weights and backends: one tensor at a time, in the instruction set's own layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import KV_BLOCK, Buffer, Dims, Dtype
from .config import ModelConfig


class Checkpoint(Protocol):
    """Weights of one model.

    `dtype` is the type its matrices are stored in, or the nearest that is computed in. `storage` has the matrices of
    matmuls that shall lie in memory in a type of their own, and that type.
    """

    name: str
    config: ModelConfig
    dtype: Dtype
    storage: Mapping[Buffer, Dtype]

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        """One weight buffer (of one layer where layered) as `megakernel.isa.buffers` shapes it.

        Float buffers with a declared type come in it whatever `dtype` says; bfloat16 comes as uint16, rows of
        quantised blocks as uint8 (`Dtype.stored`). q and k rows are in the interleaved RoPE order. Takes the buffers
        that `families.weights` lists.
        """


# Fields of Dims that a model's configuration has under the same name, and those that no weight depends on.
_SIZES = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "rms_eps")
_ELSEWHERE = (
    "kv_page", "row_block", "tokens", "logit_rows", "max_seqs", "max_context", "items", "attention_slots", "partials",
    "bias_entries",
)  # fmt: skip


def weight_dims(config: ModelConfig, dtype: Dtype) -> Dims:
    """`config` as Dims for the shapes of weight buffers; what a weight's shape cannot depend on is 1."""
    sizes: dict[str, Any] = {name: getattr(config, name) for name in _SIZES}
    return Dims(**sizes, dtype=int(dtype), kv_block=KV_BLOCK, **dict.fromkeys(_ELSEWHERE, 1))
