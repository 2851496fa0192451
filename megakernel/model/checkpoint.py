"""The seam between files of weights and backends: one tensor at a time, in the instruction set's own layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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


def weight_dims(config: ModelConfig, dtype: Dtype) -> Dims:
    """`config` as Dims for the shapes of weight buffers; what a weight's shape cannot depend on is 1."""
    return Dims(
        vocab=config.vocab,
        hidden=config.hidden,
        ffn=config.ffn,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        dtype=int(dtype),
        kv_block=KV_BLOCK,
        kv_page=1,
        row_block=1,
        tokens=1,
        logit_rows=1,
        max_seqs=1,
        max_context=1,
        items=1,
        attention_slots=1,
        partials=1,
        bias_entries=1,
    )
