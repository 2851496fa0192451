"""The memory of a model's weights and KV cache, and how much of a machine's memory the KV cache gets."""

from __future__ import annotations

import logging

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype, Forward, Split, kv_bytes
from megakernel.model.config import ModelConfig
from megakernel.roofline.work import model_weights

log = logging.getLogger(__name__)

KV_SHARE = 0.25  # the KV pool's fraction of a host's memory, unless one sequence needs more
GPU_SHARE = 0.85  # the fraction of a GPU's memory for weights and KV pool; the rest is for activations and the driver


def weight_bytes(forward: Forward, split: Split, *, tied: bool) -> int:
    """Return the bytes of one rank's weights. If embedding and LM head are tied, they count once."""
    weights = model_weights(forward, split)
    return sum(weights.values()) - (weights[Buffer.LM_HEAD] if tied else 0)


def pool_bytes(memory_bytes: float, weights: int, *, gpu: bool) -> float:
    """Return how many bytes of a machine's memory the KV pool may use, if the weights take `weights` bytes.

    On a host, the pool gets a smaller share, because other programs use the memory too. A GPU has no other user."""
    return max(GPU_SHARE * memory_bytes - weights, 0.0) if gpu else KV_SHARE * memory_bytes


def token_bytes(config: ModelConfig, dtype: Dtype, tp: int = 1, quantised_kv: bool = False) -> int:
    """Return the bytes of a token's K and V in all layers, on all `tp` ranks together."""
    split = Split(config.sizes(dtype, quantised_kv=quantised_kv), tp)
    heads = sum(part.rank_kv_heads for part in split.ranks)  # several ranks may store the same KV head
    return config.layers * heads * kv_bytes(split.model)


def kv_capacity(
    model_limit: int, per_token: int, memory_bytes: float, pool: float, max_model_len: int | None, max_num_seqs: int
) -> tuple[int, int]:
    """Return how many tokens a sequence may have, and how many the KV pool has. Each token takes `per_token` bytes, and
    the memory has `memory_bytes`.

    The pool has room for `max_num_seqs` sequences of maximum length, but uses at most `pool` bytes of the memory. It
    always has room for one such sequence, even if that takes more. Without `max_model_len`, a sequence may have as many
    tokens as the model allows and the pool holds. Raises MegakernelError if `max_model_len` exceeds the model's limit,
    or if a sequence of that length exceeds the memory. Without `max_model_len`, the pool must hold at least a token."""
    room = int(pool / per_token)
    if max_model_len is None:
        if room < 1:
            raise MegakernelError(
                f"the weights leave no room for a KV cache in {memory_bytes / 1e9:.1f} GB of memory: "
                "use more ranks (--tp) or a smaller model"
            )
        context = min(model_limit, room)
        if context < model_limit:
            log.info("context reduced from the model's %d tokens to %d to fit in memory", model_limit, context)
    elif max_model_len > model_limit:
        told = f"context {max_model_len} exceeds the model's limit of {model_limit} tokens: choose a shorter context"
        raise MegakernelError(told)
    elif max_model_len * per_token > memory_bytes:
        gigabytes = max_model_len * per_token / 1e9
        raise MegakernelError(
            f"context {max_model_len} needs {gigabytes:.1f} GB of KV cache, but there are only "
            f"{memory_bytes / 1e9:.1f} GB of memory: choose a shorter context"
        )
    else:
        context = max_model_len
    return context, max(context, min(max_num_seqs * context, room))
