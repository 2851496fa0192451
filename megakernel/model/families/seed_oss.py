"""Seed-OSS: Llama's forward pass, in which the biases of q, k and v do not imply one of the output projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer
from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward


def read(config: Keys) -> dict[str, Any]:
    """Read which matmuls have biases."""
    attention, out = config.flag("attention_bias", True), config.flag("attention_out_bias")
    return {"qkv_bias": attention, "o_bias": out, "mlp_bias": config.flag("mlp_bias")}


# GGUF files name the norm before the MLP after its place in the layer, which is behind attention.
_MLP_NORM = replace(WEIGHTS[Buffer.MLP_NORM], gguf=("blk.{}.post_attention_norm.weight",))

SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    ("seed_oss",),
    forward,
    WEIGHTS | {Buffer.MLP_NORM: _MLP_NORM},
    read,
    frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    interleaved=False,
    defaults={"max_position_embeddings": 524288, "head_dim": 128},
)
