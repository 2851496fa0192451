"""OLMo 2 and 3. Their layers are those of Llama, but norms follow attention and the MLP instead of preceding them, and
q and k have norms over all heads. OLMo 3 also has sliding windows, with an unscaled RoPE, in three of four layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig
from .family import Family, of_layer
from .llama import AFTER, ATTENTION_BIAS, BEFORE, WEIGHTS
from .qwen3 import QK_NORM
from .verbs import add_norm, attention, heads_norm, matmul, raw_qkv, rope, rounded, silu_matmul
from .windows import every_nth, layers_of, read_gguf_windows, windows_with_rope

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """If the RoPE of layers differs, each layer ends with the next one's table."""
    next_rope = [rope("next_rope", frequencies=B.INV_FREQ, output=B.ROPE, ahead=1)] if c.local_theta else []
    return Forward.of(
        BEFORE,
        [
            rounded("attn_input", inputs=B.X, output=B.H),
            raw_qkv("qkv", inputs=B.H, weights=B.W_QKV, bias=c.bias(B.B_QKV), output=B.QKV),
            heads_norm("qk_norm_rope", inputs=B.QKV, scale=B.QK_NORM, output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=c.bias(B.B_O), output=B.SUBLAYER),
            add_norm("post_attn_norm", inputs=B.SUBLAYER, scale=B.POST_ATTN_NORM, output=B.X),
            rounded("mlp_input", inputs=B.X, output=B.H),
            silu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, output=B.ACT),
            matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.SUBLAYER),
            add_norm("post_mlp_norm", inputs=B.SUBLAYER, scale=B.POST_MLP_NORM, output=B.X),
            *next_rope,
        ],
        AFTER,
    )


def read3(config: Keys) -> dict[str, Any]:
    """Read which layers have windows, and their RoPE base."""
    return windows_with_rope(config, every_nth(layers_of(config), 4), config.number("rope_theta", 5e5))


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    gguf=("olmo2",),
    models="OLMo-2-1B to 32B",
    forward=forward,
    weights=WEIGHTS
    | {
        B.QK_NORM: QK_NORM,
        B.POST_ATTN_NORM: of_layer("post_attention_layernorm", "post_attention_norm"),
        B.POST_MLP_NORM: of_layer("post_feedforward_layernorm", "post_ffw_norm"),
    },
    adjacent=(),
    fixed={"post_norms": True, "whole_norms": True},
    fields=ATTENTION_BIAS,
    defaults={"rms_norm_eps": 1e-5},
    # Only files of OLMo 3 have windows.
    read_gguf=lambda config: read_gguf_windows(config, 4, config.number("rope.freq_base", 1e4)),
    gguf_keys="attention.sliding_window_pattern rope.freq_base_swa",
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    models="Olmo-3-7B and 32B",
    read=read3,
    keys="layer_types sliding_window",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    two_ropes=True,
)
