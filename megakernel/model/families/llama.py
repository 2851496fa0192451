"""Llama: a step from token ids to sampled tokens, top to bottom, and the names of its weights in files."""

from __future__ import annotations

from typing import Any

from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig
from .family import Family, Weight
from .verbs import add_matmul, attention, gather, last_norm, logits, norm, qkv, rope, sample, silu_matmul

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """The phases of a step: those before the layers, those of each layer, those after the layers. X is the residual."""
    qkv_bias, o_bias = (B.B_QKV if c.qkv_bias else None), (B.B_O if c.o_bias else None)
    up_bias, down_bias = (B.B_GATE_UP, B.B_DOWN) if c.mlp_bias else (None, None)
    return Forward.of(
        [gather("embed", table=B.EMBED, output=B.X), rope("rope", frequencies=B.INV_FREQ, output=B.ROPE)],
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            qkv("qkv_rope", inputs=B.H, weights=B.W_QKV, bias=qkv_bias, output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=o_bias, output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            silu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, bias=up_bias, output=B.ACT),
            add_matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, bias=down_bias, output=B.X),
        ],
        [
            last_norm("final_norm", inputs=B.X, scale=B.FINAL_NORM, output=B.Y),
            logits("lm_head", inputs=B.Y, weights=B.LM_HEAD, output=B.LOGITS),
            sample("sample", inputs=B.LOGITS),
        ],
    )


_HF, _GGUF = "model.layers.{}.", "blk.{}."
WEIGHTS: dict[Buffer, Weight] = {
    B.EMBED: Weight(("model.embed_tokens.weight",), ("token_embd.weight",)),
    B.ATTN_NORM: Weight((_HF + "input_layernorm.weight",), (_GGUF + "attn_norm.weight",)),
    B.W_QKV: Weight(
        tuple(f"{_HF}self_attn.{p}_proj.weight" for p in "qkv"), tuple(f"{_GGUF}attn_{p}.weight" for p in "qkv"), 2
    ),
    B.B_QKV: Weight(
        tuple(f"{_HF}self_attn.{p}_proj.bias" for p in "qkv"), tuple(f"{_GGUF}attn_{p}.bias" for p in "qkv"), 2
    ),
    B.W_O: Weight((_HF + "self_attn.o_proj.weight",), (_GGUF + "attn_output.weight",)),
    B.B_O: Weight((_HF + "self_attn.o_proj.bias",), (_GGUF + "attn_output.bias",)),
    B.MLP_NORM: Weight((_HF + "post_attention_layernorm.weight",), (_GGUF + "ffn_norm.weight",)),
    B.W_GATE_UP: Weight(
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), (_GGUF + "ffn_gate.weight", _GGUF + "ffn_up.weight")
    ),
    B.B_GATE_UP: Weight(
        (_HF + "mlp.gate_proj.bias", _HF + "mlp.up_proj.bias"), (_GGUF + "ffn_gate.bias", _GGUF + "ffn_up.bias")
    ),
    B.W_DOWN: Weight((_HF + "mlp.down_proj.weight",), (_GGUF + "ffn_down.weight",)),
    B.B_DOWN: Weight((_HF + "mlp.down_proj.bias",), (_GGUF + "ffn_down.bias",)),
    B.FINAL_NORM: Weight(("model.norm.weight",), ("output_norm.weight",)),
    B.LM_HEAD: Weight(("lm_head.weight",), ("output.weight",)),
}


def biases(config: Keys) -> dict[str, Any]:
    """Read which matmuls have biases: `attention_bias` means those of attention, `mlp_bias` those of the MLP."""
    attention = config.flag("attention_bias")
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": config.flag("mlp_bias")}


def read(config: Keys) -> dict[str, Any]:
    """Read the biases and the sliding window. Some programs apply the window and others ignore it, but they agree on
    contexts that are not longer.
    """
    window = {"longest": config.count("sliding_window")} if config.get("sliding_window") else {}
    return biases(config) | window


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    ("llama",),
    forward,
    WEIGHTS,
    read,
    frozenset({"attention_bias", "mlp_bias", "sliding_window"}),
)
