"""Qwen3: Llama's forward pass with an RMS norm of each head of q and k before RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer, Forward, Result
from ..config import Keys, ModelConfig
from . import llama, qwen2
from .family import Family, Weight

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """Llama's phases. The phase that computes q, k and v also norms each head of q and k."""
    f = llama.forward(c)
    layer = [replace(p, head_norm=B.QK_NORM) if p.result is Result.HEADS else p for p in f.body]
    return Forward.of(f.prologue, layer, f.epilogue)


WEIGHTS = llama.WEIGHTS | {
    B.QK_NORM: Weight(
        tuple(f"model.layers.{{}}.self_attn.{p}_norm.weight" for p in "qk"),
        tuple(f"blk.{{}}.attn_{p}_norm.weight" for p in "qk"),
        2,
    )
}


def read(config: Keys) -> dict[str, Any]:
    """Read `attention_bias`, which adds a bias to all attention projections, and Qwen2's keys of sliding windows."""
    attention = config.flag("attention_bias")
    return qwen2.read(config) | {"qkv_bias": attention, "o_bias": attention}


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    ("qwen3",),
    forward,
    WEIGHTS,
    read,
    qwen2.QWEN2.keys | {"attention_bias"},
    interleaved=False,
    defaults={"max_position_embeddings": 32768},
)
