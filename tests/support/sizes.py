"""The sizes of the smallest possible step, for tests that need a model's sizes but no batch of a certain size."""

from typing import Any

from megakernel.isa import KV_BLOCK, Bucket, Dims, Dtype, Split, Worker
from megakernel.model.config import ModelConfig


def least_dims(config: ModelConfig, dtype: Dtype) -> Dims:
    """Return the sizes of a step of one row and one KV token on one rank."""
    bucket = Bucket(KV_BLOCK, *(1 for _ in range(10)))
    return Dims(Split(config.sizes(dtype)), bucket, Worker())


def config_of(d: Dims, **more: Any) -> ModelConfig:
    m = d.model
    sizes = (m.vocab, m.hidden, m.ffn, m.layers, m.heads, m.kv_heads, m.head_dim, d.bucket.max_context)
    if m.experts:
        more |= {"family": "mixtral", "experts": m.experts, "experts_per_token": m.experts_per_token}
        own = ("normalised_routes", "clipped_gates", "sigmoid_routes", "choice_bias", "route_scale")
        more |= {name: getattr(m, name) for name in (*own, "shared_experts", "shared_gate", "dense_layers")}
    if m.post_norms:
        more |= {"family": "olmo2" if m.whole_norms else "glm4", "post_norms": True, "whole_norms": bool(m.whole_norms)}
    return ModelConfig(*sizes, **more)
