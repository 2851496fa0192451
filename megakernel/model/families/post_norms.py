"""Families that normalise what a layer adds to the residual: EXAONE 4, GLM-4-0414, Gemma 3, OLMo 2 and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer, Forward, Phase
from ..config import Keys, ModelConfig
from .family import Family, of_layer
from .like_llama import GELU, GEMMA, GLM, scaled_embeddings
from .llama import AFTER, ATTENTION_BIAS, BEFORE, next_rope, qkv_phases
from .verbs import add_norm, attention, gated_matmul, matmul, norm, rounded
from .windows import every_nth, layers_of, windows, windows_with_rope

B = Buffer


def forward(c: ModelConfig, f: Family) -> Forward:
    """Norms precede and follow attention and the MLP."""
    return _followed(
        c,
        f,
        norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
        norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
    )


def forward_olmo(c: ModelConfig, f: Family) -> Forward:
    """Norms only follow attention and the MLP. q and k have norms too."""
    return _followed(c, f, rounded("attn_input", inputs=B.X, output=B.H), rounded("mlp_input", inputs=B.X, output=B.H))


def _followed(c: ModelConfig, f: Family, before_attention: Phase, before_mlp: Phase) -> Forward:
    """Return a step with norms after attention and the MLP, whose inputs the last two arguments compute."""
    return Forward.of(
        BEFORE,
        [
            before_attention,
            *qkv_phases(c, f),
            attention("attention", inputs=B.Q, output=B.ATTN),
            matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=c.bias(B.B_O), output=B.SUBLAYER),
            add_norm("post_attn_norm", inputs=B.SUBLAYER, scale=B.POST_ATTN_NORM, output=B.X),
            before_mlp,
            gated_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, gelu=f.gelu, output=B.ACT),
            matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.SUBLAYER),
            add_norm("post_mlp_norm", inputs=B.SUBLAYER, scale=B.POST_MLP_NORM, output=B.X),
            *next_rope(c),
        ],
        AFTER,
    )


GLM4 = replace(
    GLM,
    name="glm4",
    models="GLM-4-9B-0414, GLM-4-32B-0414",
    gguf=("glm4",),
    forward=forward,
    weights={
        **GLM.weights,
        B.POST_ATTN_NORM: of_layer("post_self_attn_layernorm", "post_attention_norm"),
        B.POST_MLP_NORM: of_layer("post_mlp_layernorm", "post_ffw_norm"),
    },
    fixed={"post_norms": True},
)


def _scalar(config: Keys) -> dict[str, Any]:
    """Read the factors by which Gemma 2 and 3 multiply embeddings and attention scores."""
    scalar = config.number("query_pre_attn_scalar", 256)
    if config.gguf:  # as in llama.cpp, which divides scores of the 27B models by the root of hidden / heads
        large = config.count("num_hidden_layers") in (46, 62)
        heads = max(config.count("num_attention_heads"), 1)
        scalar = max(1, config.count("hidden_size") / heads if large else config.count("head_dim", 256))
    if scalar <= 0:
        raise MegakernelError(f"{config.source}: query_pre_attn_scalar is {scalar}; it must be positive")
    return scaled_embeddings(config.count("hidden_size")) | {"attention_multiplier": scalar**-0.5}


def _gemma2(config: Keys) -> dict[str, Any]:
    """Read which layers have windows, and the caps of scores and logits. A null means no cap."""
    caps = {"score_cap": ("attn_logit_softcapping", 50.0), "logit_cap": ("final_logit_softcapping", 30.0)}
    given = {name: own for name, own in caps.items() if config.get(*own) is not None}
    return _scalar(config) | windows(config, every_nth(layers_of(config), 2)) | config.fields(given)


def _gemma3(config: Keys) -> dict[str, Any]:
    every = config.count("sliding_window_pattern", 6)
    if every < 1:
        raise MegakernelError(f"{config.source}: sliding_window_pattern is {every}; it must be at least 1")
    full, theta = every_nth(layers_of(config), every), config.number("rope_local_base_freq", 1e4)
    return _scalar(config) | windows_with_rope(config, full, theta)


_NORMS_BEHIND = {
    B.POST_ATTN_NORM: of_layer("post_attention_layernorm", "post_attention_norm"),
    B.POST_MLP_NORM: of_layer("post_feedforward_layernorm", "post_ffw_norm"),
}
GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    models="Gemma 2 2B to 27B",
    gguf=("gemma2",),
    forward=forward,
    weights=_NORMS_BEHIND | {B.MLP_NORM: of_layer("pre_feedforward_layernorm", "ffn_norm")},
    fixed={"rounds_embedding": True, "post_norms": True},
    read=_gemma2,
    defaults={**GEMMA.defaults, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000},
    activations=(GELU,),
)

VAULT_GEMMA = replace(
    GEMMA2,
    name="vaultgemma",
    models="VaultGemma 1B",
    gguf=(),
    forward=None,
    weights={B.MLP_NORM: of_layer("pre_feedforward_layernorm", "ffn_norm")},
    fixed=GEMMA.fixed,
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    models="Gemma 3 270M and 1B, and the text part of 4B to 27B (`Gemma3ForConditionalGeneration`)",
    also=("Gemma3ForCausalLM",),
    inside=("Gemma3ForConditionalGeneration",),
    gguf=("gemma3",),
    head_norms=True,
    read=_gemma3,
    defaults={**GEMMA2.defaults, "max_position_embeddings": 131072, "rope_theta": 1e6, "vocab_size": 262208},
    two_ropes=True,
)


def _exaone4(config: Keys) -> dict[str, Any]:
    """Read which layers have windows. If some layers have one, only these layers have RoPE."""
    layers, pattern = layers_of(config), config.get("sliding_window_pattern")
    if config.get("sliding_window", 4096) is None:
        return {}
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        pattern = len(pattern)
    every = Keys({"sliding_window_pattern": pattern}, config.source).count("sliding_window_pattern", 4)
    windowed = windows(config, every_nth(layers, every) if every > 0 else ())
    return windowed | {"nope_layers": windowed.get("full_layers", tuple(layers))}


EXAONE4 = Family(
    name="exaone4",
    models="EXAONE 4.0, on CPUs only",
    gguf=("exaone4",),
    forward=forward_olmo,
    head_norms=True,
    weights=_NORMS_BEHIND,
    fixed={"post_norms": True},
    read=_exaone4,
    keys="layer_types max_window_layers reorder_qk_norm",
    defaults={"rms_norm_eps": 1e-5},
)


def _olmo3(config: Keys) -> dict[str, Any]:
    theta = config.number("rope_local_base_freq", config.number("rope_theta", 5e5))
    return windows_with_rope(config, every_nth(layers_of(config), 4), theta)


OLMO2 = Family(
    name="olmo2",
    models="OLMo-2-1B to 32B",
    gguf=("olmo2",),
    forward=forward_olmo,
    weights=_NORMS_BEHIND,
    fixed={"post_norms": True, "whole_norms": True},
    fields=ATTENTION_BIAS,
    defaults={"rms_norm_eps": 1e-5},
    read=lambda config: _olmo3(config) if config.gguf else {},  # GGUF files of OLMo 3 have the same name
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    models="Olmo-3-7B and 32B",
    read=_olmo3,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    two_ropes=True,
)
