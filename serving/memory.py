"""What a model and its KV cache take, and how much of a machine's memory the cache may have."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dims, Dtype
from ..isa.buffers import Space
from ..model.checkpoint import weight_dims
from ..model.config import LlamaConfig

log = logging.getLogger(__name__)

KV_SHARE = 0.25  # of memory, for the KV pool


def weight_bytes(dims: Dims, *, tied: bool) -> int:
    """Bytes of all weights of one rank; tied embeddings count once."""
    total = 0
    for buffer, spec in BUFFERS.items():
        if spec.space is Space.WEIGHT and not (tied and buffer is Buffer.LM_HEAD):
            copies = dims.layers if spec.layered else 1
            total += copies * math.prod(spec.shape(dims, 0)) * spec.resolve_dtype(dims).itemsize
    return total


def kv_token_bytes(config: LlamaConfig, dtype: Dtype, tp: int = 1) -> int:
    """Bytes of K and V of one token, all layers and all ranks; more ranks may hold the same KV head."""
    dims = replace(weight_dims(config, dtype), tp=tp)
    columns = sum(replace(dims, rank=rank).kv_cols for rank in range(tp))
    return 2 * config.layers * columns * dtype.itemsize


def kv_capacity(
    config: LlamaConfig, dtype: Dtype, memory_bytes: float, max_context: int | None, max_seqs: int, tp: int = 1
) -> tuple[int, int]:
    """(tokens a sequence may reach, tokens of the KV pool), where `tp` ranks share memory.

    The pool holds `max_seqs` full sequences, or what fits KV_SHARE of memory, but at least one sequence. Raises
    MegakernelError where `max_context` exceeds what the model was made for or what memory holds.
    """
    per_token = kv_token_bytes(config, dtype, tp)
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
