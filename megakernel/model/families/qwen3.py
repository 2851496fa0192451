"""Qwen3: Llama's forward pass with an RMS norm of each head of q and k before RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer, Dims, Forward, Result
from ..config import ModelConfig
from . import llama, qwen2
from .family import Family, Norm, Reader, Weight


def forward(c: ModelConfig, d: Dims, norm: Norm) -> Forward:
    made = llama.forward(c, d, norm)
    return Forward.of(
        *(
            [replace(p, head_norm=Buffer.QK_NORM) if p.result is Result.HEADS else p for p in segment]
            for segment in made.segments
        )
    )


WEIGHTS = llama.WEIGHTS | {
    Buffer.QK_NORM: Weight(
        tuple(f"model.layers.{{}}.self_attn.{p}_norm.weight" for p in "qk"),
        tuple(f"blk.{{}}.attn_{p}_norm.weight" for p in "qk"),
        2,
    )
}


def read(config: Reader) -> dict[str, Any]:
    """Read `attention_bias`, which adds a bias to all attention projections. The entries of config.json about
    sliding windows are treated as in Qwen2.
    """
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
)
