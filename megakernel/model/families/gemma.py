"""Gemma and Gemma 3, without images. The MLP has a GELU gate. Files contain the weights of norms minus 1. Gemma 3 also
has norms after attention and the MLP. Five of six layers have sliding windows, and another RoPE base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer, Forward, Result
from ..config import Keys, ModelConfig
from . import glm4, llama, qwen3
from .family import Family, Weight
from .windows import every_nth, read_gguf_windows, windows_with_rope

B = Buffer
_GELU = "gelu_pytorch_tanh"


def _gelu(f: Forward) -> Forward:
    body = [replace(p, result=Result.GELU_GATED) if p.result is Result.GATED else p for p in f.body]
    return Forward.of(f.prologue, body, f.epilogue)


def forward(c: ModelConfig) -> Forward:
    """Llama's phases with another gate."""
    return _gelu(llama.forward(c))


def forward3(c: ModelConfig) -> Forward:
    """Qwen3's phases with another gate and two norms more in each layer, which ends with the next one's RoPE table."""
    f = glm4.post_norms(_gelu(qwen3.forward(c)))
    _, rope = f.prologue
    return Forward.of(f.prologue, [*f.body, replace(rope, name="next_rope", ahead=1)], f.epilogue)


def _plus_one(weights: Mapping[Buffer, Weight]) -> dict[Buffer, Weight]:
    return {buffer: replace(weight, plus_one="NORM" in buffer.name) for buffer, weight in weights.items()}


WEIGHTS3 = qwen3.WEIGHTS | {
    B.POST_ATTN_NORM: glm4.norm("post_attention_layernorm", "post_attention_norm"),
    B.MLP_NORM: glm4.norm("pre_feedforward_layernorm", "ffn_norm"),
    B.POST_MLP_NORM: glm4.norm("post_feedforward_layernorm", "post_ffw_norm"),
}


def _embeddings(hidden: int) -> dict[str, Any]:
    return {"embedding_multiplier": math.sqrt(hidden), "rounds_embedding": True}


def read(config: Keys) -> dict[str, Any]:
    """Check the keys whose other values no operation computes."""
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    config.only("hidden_activation", _GELU)
    return _embeddings(config.count("hidden_size"))


def read3(config: Keys) -> dict[str, Any]:
    """Read which layers have windows, their RoPE base, and what multiplies attention scores."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.only(key)
    every = config.count("sliding_window_pattern", 6)
    if every < 1:
        raise MegakernelError(f"{config.source}: sliding_window_pattern is {every}; it must be at least 1")
    scalar = config.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise MegakernelError(f"{config.source}: query_pre_attn_scalar is {scalar}; it must be positive")
    full, theta = every_nth(config.count("num_hidden_layers"), every), config.number("rope_local_base_freq", 1e4)
    windowed = windows_with_rope(config, full, theta)
    return read(config) | windowed | {"post_norms": True, "attention_multiplier": scalar**-0.5}


def read_gguf3(config: Keys) -> dict[str, Any]:
    """Read the windows and their RoPE base. llama.cpp assumes most of the other numbers."""
    layers, hidden, heads = (config.count(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    # The 27B model, with 62 layers, divides scores by the root of another size than that of its heads.
    size = hidden / max(heads, 1) if layers == 62 else config.count("attention.key_length", 256)
    return (
        _embeddings(hidden)
        | read_gguf_windows(config, 6, 1e4)
        | {"post_norms": True, "attention_multiplier": size**-0.5}
    )


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    ("gemma",),
    forward,
    _plus_one(llama.WEIGHTS),
    read,
    frozenset({"attention_bias", "hidden_activation", "use_bidirectional_attention"}),
    interleaved=False,
    defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    read_gguf=lambda config: _embeddings(config.count("embedding_length")),
    # The first files say "gelu" and mean the approximation, so other programs take it for that too.
    activations=(_GELU, "gelu"),
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    ("gemma3",),
    forward3,
    _plus_one(WEIGHTS3),
    read3,
    GEMMA.keys
    | {"attn_logit_softcapping", "cache_implementation", "final_logit_softcapping", "layer_types"}
    | {"query_pre_attn_scalar", "rope_local_base_freq", "sliding_window", "sliding_window_pattern"},
    interleaved=False,
    defaults={**GEMMA.defaults, "max_position_embeddings": 131072, "rope_theta": 1e6},
    read_gguf=read_gguf3,
    two_ropes=True,
    gguf_keys=frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
    activations=(_GELU,),
)
