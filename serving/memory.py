"""The memory of a model's weights and KV cache, and how much of a machine's memory the KV cache gets."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import MegakernelError
from ..isa import Buffer, Dims, Dtype, Forward, kv_bytes
from ..model.checkpoint import weight_dims
from ..model.config import ModelConfig
from ..roofline.work import model_weights

log = logging.getLogger(__name__)

KV_SHARE = 0.25  # part of the machine's memory that the KV pool may take


def weight_bytes(forward: Forward, dims: Dims, *, tied: bool) -> int:
    """Bytes of one rank's weights. Tied embeddings count once."""
    weights = model_weights(forward, dims)
    return sum(weights.values()) - (weights[Buffer.LM_HEAD] if tied else 0)


def kv_capacity(
    config: ModelConfig,
    dtype: Dtype,
    memory_bytes: float,
    max_context: int | None,
    max_seqs: int,
    tp: int = 1,
    quantised_kv: bool = False,
) -> tuple[int, int]:
    """(maximum tokens of a sequence, tokens of the KV pool) for `tp` ranks that share `memory_bytes`.

    The pool has room for `max_seqs` full sequences, or for fewer if they exceed KV_SHARE of the memory, but for at
    least one. Raises MegakernelError if `max_context` exceeds the model's limit or the memory.
    """
    dims = replace(weight_dims(config, dtype), tp=tp, quantised_kv=int(quantised_kv))
    heads = sum(replace(dims, rank=rank).rank_kv_heads for rank in range(tp))  # several ranks may have the same KV head
    per_token = config.layers * heads * kv_bytes(dims)
    room = int(KV_SHARE * memory_bytes / per_token)
    if max_context is None:
        context = min(config.max_context, room)
        if context < config.max_context:
            log.info("context reduced from the model's %d tokens to %d to fit in memory", config.max_context, context)
    elif max_context > config.max_context:
        raise MegakernelError(
            f"context {max_context} exceeds the model's limit of {config.max_context} tokens: lower it"
        )
    elif max_context * per_token > memory_bytes:
        gigabytes = max_context * per_token / 1e9
        raise MegakernelError(
            f"context {max_context} needs {gigabytes:.1f} GB of KV cache, more than the memory: lower it"
        )
    else:
        context = max_context
    return context, max(context, min(max_seqs * context, room))
