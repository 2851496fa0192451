"""Qwen3: Llama's forward pass with an RMS norm of each head of q and k before RoPE."""

from __future__ import annotations

from ...isa import Buffer, Forward
from ..config import ModelConfig
from .family import Family, of_layer
from .like_llama import QWEN2, read_qwen2
from .llama import AFTER, ATTENTION_BIAS, BEFORE, WEIGHTS
from .verbs import add_matmul, attention, norm, qkv, silu_matmul

B = Buffer
QK_NORM = of_layer("self_attn.q_norm self_attn.k_norm", "attn_q_norm attn_k_norm")


def forward(c: ModelConfig) -> Forward:
    """The phase that computes q, k and v also normalises each head of q and k."""
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            qkv("qkv_rope", B.H, weights=B.W_QKV, bias=c.bias(B.B_QKV), head_norm=B.QK_NORM, output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=c.bias(B.B_O), output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            silu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, output=B.ACT),
            add_matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.X),
        ],
        AFTER,
    )


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf=("qwen3",),
    models="Qwen3",
    forward=forward,
    weights=WEIGHTS | {B.QK_NORM: QK_NORM},
    adjacent=(),
    fields=ATTENTION_BIAS,
    read=read_qwen2,
    keys=QWEN2.keys,
    defaults={"max_position_embeddings": 32768},
)
