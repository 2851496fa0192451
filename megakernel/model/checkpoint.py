"""The seam between files of weights and backends: one tensor at a time, in the instruction set's own layout."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import KV_BLOCK, Buffer, Dims, Dtype
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


def weight_dims(config: LlamaConfig, dtype: Dtype) -> Dims:
    """`config` as Dims for the shapes of weight buffers; what a weight's shape cannot depend on is 1."""
    return Dims(
        vocab=config.vocab,
        hidden=config.hidden,
        ffn=config.ffn,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        attention_bias=int(config.attention_bias),
        mlp_bias=int(config.mlp_bias),
        rms_eps=config.rms_eps,
        dtype=int(dtype),
        kv_block=KV_BLOCK,
        page=1,
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
