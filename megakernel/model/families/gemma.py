"""Gemma and Gemma 3, without images. The MLP has a GELU gate. Files contain the weights of norms minus 1. Gemma 3 also
has norms after attention and the MLP. Five of six layers have sliding windows, and another RoPE base."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig
from .family import Family, of_layer
from .llama import AFTER, BEFORE, WEIGHTS
from .qwen3 import QK_NORM
from .verbs import add_matmul, add_norm, attention, gelu_matmul, matmul, norm, qkv, rope
from .windows import every_nth, layers_of, read_gguf_windows, windows_with_rope

B = Buffer
_GELU = "gelu_pytorch_tanh"


def forward(c: ModelConfig) -> Forward:
    """Gemma: Llama's phases with another gate."""
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            qkv("qkv_rope", inputs=B.H, weights=B.W_QKV, output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            gelu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, output=B.ACT),
            add_matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.X),
        ],
        AFTER,
    )


def forward3(c: ModelConfig) -> Forward:
    """Gemma 3: norms of the heads of q and k, and of all results. Each layer ends with the next one's RoPE table."""
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            qkv("qkv_rope", inputs=B.H, weights=B.W_QKV, head_norm=B.QK_NORM, output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            matmul("o_proj", inputs=B.ATTN, weights=B.W_O, output=B.SUBLAYER),
            add_norm("post_attn_norm", inputs=B.SUBLAYER, scale=B.POST_ATTN_NORM, output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            gelu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, output=B.ACT),
            matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.SUBLAYER),
            add_norm("post_mlp_norm", inputs=B.SUBLAYER, scale=B.POST_MLP_NORM, output=B.X),
            rope("next_rope", frequencies=B.INV_FREQ, output=B.ROPE, ahead=1),
        ],
        AFTER,
    )


def _embeddings(hidden: int) -> dict[str, Any]:
    return {"embedding_multiplier": math.sqrt(hidden)}


def read3(config: Keys) -> dict[str, Any]:
    """Read which layers have windows, their RoPE base, and what multiplies attention scores."""
    every = config.count("sliding_window_pattern", 6)
    if every < 1:
        raise MegakernelError(f"{config.source}: sliding_window_pattern is {every}; it must be at least 1")
    scalar = config.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise MegakernelError(f"{config.source}: query_pre_attn_scalar is {scalar}; it must be positive")
    windowed = windows_with_rope(
        config, every_nth(layers_of(config), every), config.number("rope_local_base_freq", 1e4)
    )
    return _embeddings(config.count("hidden_size")) | windowed | {"attention_multiplier": scalar**-0.5}


def read_gguf3(config: Keys) -> dict[str, Any]:
    """Read the windows and their RoPE base. llama.cpp assumes most of the other numbers."""
    layers, hidden, heads = (config.count(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    # The 27B model, with 62 layers, divides scores by the root of another size than that of its heads.
    size = hidden / max(heads, 1) if layers == 62 else config.count("attention.key_length", 256)
    return _embeddings(hidden) | read_gguf_windows(config, 6, 1e4) | {"attention_multiplier": size**-0.5}


GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    gguf=("gemma",),
    models="Gemma 2B and 7B",
    forward=forward,
    weights=WEIGHTS,
    adjacent=(),
    norms_minus_one=True,
    fixed={"rounds_embedding": True},
    only={"attention_bias": (False,), "use_bidirectional_attention": (False,), "hidden_activation": (_GELU,)},
    read=lambda config: _embeddings(config.count("hidden_size")),
    defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    read_gguf=lambda config: _embeddings(config.count("embedding_length")),
    # The first files say "gelu" and mean the approximation, so other programs take it for that too.
    activations=(_GELU, "gelu"),
)

GEMMA3 = replace(
    GEMMA,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    gguf=("gemma3",),
    models="Gemma 3 270M and 1B",
    forward=forward3,
    weights=WEIGHTS
    | {
        B.QK_NORM: QK_NORM,
        B.POST_ATTN_NORM: of_layer("post_attention_layernorm", "post_attention_norm"),
        B.MLP_NORM: of_layer("pre_feedforward_layernorm", "ffn_norm"),
        B.POST_MLP_NORM: of_layer("post_feedforward_layernorm", "post_ffw_norm"),
    },
    fixed={"rounds_embedding": True, "post_norms": True},
    only={**GEMMA.only, "attn_logit_softcapping": (), "final_logit_softcapping": ()},
    read=read3,
    keys="cache_implementation layer_types query_pre_attn_scalar rope_local_base_freq sliding_window "
    "sliding_window_pattern",
    defaults={**GEMMA.defaults, "max_position_embeddings": 131072, "rope_theta": 1e6},
    activations=(_GELU,),
    two_ropes=True,
    read_gguf=read_gguf3,
    gguf_keys="attention.sliding_window_pattern rope.freq_base_swa",
)
