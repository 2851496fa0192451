"""Qwen3 with experts: Qwen3's attention, and an MLP of experts in every layer."""

from __future__ import annotations

from typing import Any

from ...isa import Forward
from ..config import Keys, ModelConfig
from . import mixtral, qwen3
from .family import Family


def forward(c: ModelConfig) -> Forward:
    """Qwen3's phases with experts."""
    return mixtral.with_experts(qwen3.forward(c))


def read(config: Keys) -> dict[str, Any]:
    """Read the biases, the sliding window, which all layers have if it is turned on, and the experts. Layers without
    experts are not supported.
    """
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [])
    attention, windowed = config.flag("attention_bias"), config.flag("use_sliding_window")
    windowed &= config.raw.get("sliding_window", 4096) is not None
    return (
        {"qkv_bias": attention, "o_bias": attention}
        | ({"window": config.count("sliding_window", 4096)} if windowed else {})
        | mixtral.counts(config, mixtral.EXPERTS, "num_experts_per_tok")
        | {"ffn": config.count("moe_intermediate_size"), "normalised_routes": config.flag("norm_topk_prob")}
    )


def read_gguf(config: Keys) -> dict[str, Any]:
    """Read the experts. The architecture always divides the weights of a token's experts by their sum."""
    return mixtral.read_gguf(config) | {"ffn": config.count("expert_feed_forward_length")}


_PARTS = ("gate", *(f"experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")))

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ("qwen3moe",),
    forward,
    qwen3.WEIGHTS | mixtral.expert_weights(*(f"mlp.{part}.weight" for part in _PARTS)),
    read,
    qwen3.QWEN3.keys
    | {*mixtral.EXPERTS, "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
    | {"decoder_sparse_step", "mlp_only_layers"}
    | mixtral.HARMLESS,
    interleaved=False,
    defaults={"max_position_embeddings": 32768},
    read_gguf=read_gguf,
    gguf_keys=mixtral.GGUF_KEYS | {"expert_feed_forward_length"},
)
