"""Qwen3: Llama's forward pass with an RMS norm of each head of q and k before RoPE."""

from __future__ import annotations

from typing import Any

from ...isa import Buffer, Forward
from ..config import ModelConfig
from . import llama, qwen2
from .family import Family, Reader, Weight
from .verbs import add_matmul, attention, norm, qkv, silu_matmul

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """The phases of a step. X is the residual."""
    qkv_bias, o_bias = (B.B_QKV if c.qkv_bias else None), (B.B_O if c.o_bias else None)
    around = llama.forward(c)
    layer = [
        norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
        qkv("qkv_rope", inputs=B.H, weights=B.W_QKV, bias=qkv_bias, head_norm=B.QK_NORM, output=B.Q),
        attention("attention", inputs=B.Q, output=B.ATTN),
        add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=o_bias, output=B.X),
        norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
        silu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, output=B.ACT),
        add_matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.X),
    ]
    return Forward.of(around.prologue, layer, around.epilogue)


WEIGHTS = llama.WEIGHTS | {
    B.QK_NORM: Weight(
        tuple(f"model.layers.{{}}.self_attn.{p}_norm.weight" for p in "qk"),
        tuple(f"blk.{{}}.attn_{p}_norm.weight" for p in "qk"),
        2,
    )
}


def read(config: Reader) -> dict[str, Any]:
    """Read `attention_bias`, which adds a bias to all attention projections. The entries of config.json about sliding
    windows are treated as in Qwen2.
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
