"""Llama's forward pass, from token ids to sampled tokens, and the parts of it that other families share."""

from __future__ import annotations

from ...isa import Buffer, Forward, Phase
from ..config import ModelConfig
from .family import Family
from .verbs import (
    add_experts,
    add_matmul,
    attention,
    experts,
    gated_experts,
    gated_matmul,
    gather,
    heads_norm,
    last_norm,
    logits,
    norm,
    qkv,
    raw_qkv,
    rope,
    route,
    sample,
)

B = Buffer

# The phases before and after the layers, which are the same in all families. X is the residual.
BEFORE = (gather("embed", table=B.EMBED, output=B.X), rope("rope", frequencies=B.INV_FREQ, output=B.ROPE))
AFTER = (
    last_norm("final_norm", inputs=B.X, scale=B.FINAL_NORM, output=B.Y),
    logits("lm_head", inputs=B.Y, weights=B.LM_HEAD, output=B.LOGITS),
    sample("sample", inputs=B.LOGITS),
)


def forward(c: ModelConfig, f: Family) -> Forward:
    """The phases of a step: those before the layers, those of each layer, those after the layers."""
    mlp = [
        gated_matmul("gate_up_silu", B.H, weights=B.W_GATE_UP, bias=c.bias(B.B_GATE_UP), gelu=f.gelu, output=B.ACT),
        add_matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, bias=c.bias(B.B_DOWN), output=B.X),
    ]
    if c.experts:
        mlp = [
            route("route", inputs=B.H, router=B.W_ROUTER, bias=c.bias(B.B_ROUTER), output=B.ROUTES),
            gated_experts("experts_gate_up", B.H, weights=B.W_GATE_UP, bias=c.bias(B.B_GATE_UP), output=B.ACT),
            experts("experts_down", inputs=B.ACT, weights=B.W_DOWN, bias=c.bias(B.B_DOWN), output=B.EXPERTS_OUT),
            add_experts("combine", inputs=B.EXPERTS_OUT, weights=B.W_DOWN, output=B.X),
        ]
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            *qkv_phases(c, f),
            attention("attention", inputs=B.Q, sinks=f.sinks, output=B.ATTN),
            add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=c.bias(B.B_O), output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            *mlp,
            *next_rope(c),
        ],
        AFTER,
    )


def qkv_phases(c: ModelConfig, f: Family) -> list[Phase]:
    """The phases that compute q, k and v of the inputs H. With `c.whole_norms`, norms of q and k span all heads."""
    bias = c.bias(B.B_QKV)
    if not c.whole_norms:
        norms = f.head_norms or c.head_norms
        return [qkv("qkv_rope", B.H, weights=B.W_QKV, bias=bias, head_norms=norms, output=B.Q)]
    return [
        raw_qkv("qkv", inputs=B.H, weights=B.W_QKV, bias=bias, output=B.QKV),
        heads_norm("qk_norm_rope", inputs=B.QKV, scale=B.QK_NORM, output=B.Q),
    ]


def next_rope(c: ModelConfig) -> list[Phase]:
    """If the RoPE of layers differs, each layer ends by computing the next layer's table of cosines and sines."""
    differs = c.local_theta or c.nope_layers
    return [rope("next_rope", frequencies=B.INV_FREQ, output=B.ROPE, ahead=1)] if differs else []


# Fields of ModelConfig for the biases of attention and of the MLP, with the keys that many families have for them.
ATTENTION_BIAS = {"qkv_bias": ("attention_bias", False), "o_bias": ("attention_bias", False)}
BIASES = ATTENTION_BIAS | {"mlp_bias": ("mlp_bias", False)}


LLAMA = Family(
    name="llama",
    models="Llama 1 to 3.3, SmolLM2, Falcon3, and all others whose config.json says `LlamaForCausalLM`",
    gguf=("llama",),
    adjacent=("gguf",),
    fields=BIASES,
    # Some inference engines ignore the sliding window. Results agree within one window, which limits the context here.
    read=lambda config: {"longest": config.count("sliding_window")} if config.get("sliding_window") else {},
)
