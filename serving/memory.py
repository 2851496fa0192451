"""What a model and its KV cache take, and how much of a machine's memory the cache may have."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import MegakernelError
from ..isa import Buffer, Dims, Dtype, Forward, kv_bytes
from ..model.checkpoint import weight_dims
from ..model.config import ModelConfig
from ..roofline.work import model_weights

log = logging.getLogger(__name__)

KV_SHARE = 0.25  # of memory, for the KV pool


def weight_bytes(forward: Forward, dims: Dims, *, tied: bool) -> int:
    """Bytes of all weights of one rank; tied embeddings count once."""
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
    """(tokens a sequence may reach, tokens of the KV pool), where `tp` ranks share memory.

    The pool holds `max_seqs` full sequences, or what fits KV_SHARE of memory, but at least one sequence. Raises
    MegakernelError where `max_context` exceeds what the model was made for or what memory holds.
    """
    dims = replace(weight_dims(config, dtype), tp=tp, quantised_kv=int(quantised_kv))
    heads = sum(replace(dims, rank=rank).rank_kv_heads for rank in range(tp))  # more ranks may hold the same KV head
    per_token = config.layers * heads * kv_bytes(dims)
    room = int(KV_SHARE * memory_bytes / per_token)
    if max_context is None:
        context = min(config.max_context, room)
        if context < config.max_context:
            log.info("context cut from the model's %d tokens to %d, what memory holds", config.max_context, context)
    elif max_context > config.max_context:
        raise MegakernelError(f"context {max_context} is more than the {config.max_context} the model was made for")
    elif max_context * per_token > memory_bytes:
        gigabytes = max_context * per_token / 1e9
        raise MegakernelError(f"context {max_context} needs {gigabytes:.1f} GB of KV cache, more than memory: lower it")
    else:
        context = max_context
    return context, max(context, min(max_seqs * context, room))
