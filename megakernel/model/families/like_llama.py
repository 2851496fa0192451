"""Families with Llama's phases, as data: other keys and defaults in files, other names or orders of weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer
from ..config import Keys
from .family import Family, of_layer
from .llama import ATTENTION_BIAS, BIASES, forward
from .windows import every_nth, layers_of, read_gguf_window, windows

GELU = "gelu_pytorch_tanh"


def scaled_embeddings(hidden: int) -> dict[str, Any]:
    """Gemma multiplies embeddings by the root of their size. `check_config` later refuses a size below 1."""
    return {"embedding_multiplier": math.sqrt(max(hidden, 1))}


# gate and up in one tensor
_ONE_GATE_UP = of_layer("mlp.gate_up_proj mlp.gate_up_proj", "ffn_up ffn_up")

CWM = Family(
    name="cwm",
    architecture="CwmForCausalLM",
    forward=forward,
    fields={"mlp_bias": ("mlp_bias", False)},
    read=lambda config: windows(config, layers_of(config)[::4], 8192),
    keys="layer_types sliding_window",
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128},
)

ERNIE4_5 = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    gguf=("ernie4_5",),
    forward=forward,
    adjacent=("safetensors", "gguf"),
    fields=dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), ("use_bias", False)),
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
)

GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    gguf=("gemma",),
    forward=forward,
    gelu=True,
    adjacent=(),
    norms_minus_one=True,
    fixed={"rounds_embedding": True},
    only={"attention_bias": (False,), "use_bidirectional_attention": (False,), "hidden_activation": (GELU,)},
    read=lambda config: scaled_embeddings(config.count("hidden_size")),
    defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    read_gguf=lambda config: scaled_embeddings(config.count("embedding_length")),
    # The first files say "gelu" and mean the approximation, so other programs take it for that too.
    activations=(GELU, "gelu"),
)

GLM = Family(
    name="glm",
    architecture="GlmForCausalLM",
    forward=forward,
    weights={Buffer.W_GATE_UP: _ONE_GATE_UP},
    adjacent=("safetensors", "gguf"),
    fields={"qkv_bias": ("attention_bias", True)},
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
    | {"head_dim": 128},
)

# The names of Granite's multipliers in config.json and in GGUF files. ModelConfig folds them into other numbers.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    gguf=("granite",),
    forward=forward,
    fields=BIASES | {name: (name, 1.0) for name in _MULTIPLIERS},
    gguf_fields={name: (key, 0.0) for name, key in _MULTIPLIERS.items()},
)

# GGUF files of the architecture "llama" may also contain Mistral models, because the forward pass is the same.
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    inside=("Mistral3ForConditionalGeneration",),
    gguf=("llama", "mistral3"),
    forward=forward,
    read=windows,
    keys="sliding_window",
    defaults={"max_position_embeddings": 131072},
    read_gguf=read_gguf_window,
)

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    keys="sliding_window layer_types",
)

MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    read=lambda config: windows(config) if "sliding_window" in config.raw else {},
    defaults={"max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
)


def _phi3(config: Keys) -> dict[str, Any]:
    """Read the sliding window. Other programs take the RoPE kind "yarn" of this family for "longrope"."""
    scaling = Keys(config.get("rope_parameters") or config.get("rope_scaling") or {}, config.source)
    for spelling in ("rope_type", "type"):
        scaling.only(spelling, "default", "longrope", "su")
    return windows(config) if config.get("sliding_window") else {}


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    gguf=("phi3",),
    forward=forward,
    weights={
        Buffer.W_QKV: of_layer("self_attn.qkv_proj " * 3, "attn_qkv " * 3),
        Buffer.W_GATE_UP: _ONE_GATE_UP,
    },
    adjacent=(),
    only={"full_attn_mod": (1,), "interpolate_factor": (1,)},  # in the files of Phi-4-mini; no program reads them
    read=_phi3,
    keys="sliding_window",
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    | {"partial_rotary_factor": 1.0},
    read_gguf=read_gguf_window,
)


def _qwen2(config: Keys) -> dict[str, Any]:
    """Read the sliding window, which only the layers from `max_window_layers` on use, and only if it is turned on."""
    if not config.flag("use_sliding_window"):
        config.names("layer_types", "full_attention")
        return {}
    return windows(config, layers_of(config)[: max(config.count("max_window_layers", 28), 0)])


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf=("qwen2",),
    forward=forward,
    adjacent=(),
    fixed={"qkv_bias": True},
    read=_qwen2,
    keys="layer_types max_window_layers sliding_window use_sliding_window",
    defaults={"max_position_embeddings": 32768},
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    inside=("Qwen3VLForConditionalGeneration",),
    gguf=("qwen3",),
    forward=forward,
    head_norms=True,
    adjacent=(),
    fields=ATTENTION_BIAS,
    read=_qwen2,
    keys=QWEN2.keys,
    defaults={"max_position_embeddings": 32768},
)

SEED_OSS = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    gguf=("seed_oss",),
    forward=forward,
    # GGUF files name the norm before the MLP after its place in the layer, which is behind attention.
    weights={Buffer.MLP_NORM: of_layer("post_attention_layernorm", "post_attention_norm")},
    adjacent=(),
    fields=BIASES | {"qkv_bias": ("attention_bias", True), "o_bias": ("attention_out_bias", False)},
    defaults={"max_position_embeddings": 524288, "head_dim": 128},
)


def _smollm3(config: Keys) -> dict[str, Any]:
    """Read which layers have RoPE: a list with 1 for these layers and 0 for others, or else an interval."""
    layers, interval = layers_of(config), config.count("no_rope_layer_interval", 4)
    rotated = None if config.get("no_rope_layers") is None else config.numbers("no_rope_layers")
    if interval < 1 or (rotated is not None and len(rotated) < len(layers)):
        raise MegakernelError(
            f"{config.source}: no_rope_layers and no_rope_layer_interval do not say which layers have RoPE"
        )
    nope = every_nth(layers, interval) if rotated is None else (i for i in layers if not rotated[i])
    return {"nope_layers": tuple(nope)}


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    gguf=("smollm3",),
    forward=forward,
    fields=BIASES,
    only={"use_sliding_window": (False,)},
    read=_smollm3,
    keys="max_window_layers no_rope_layer_interval no_rope_layers sliding_window",
    defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
    # llama.cpp assumes that every fourth layer has no RoPE.
    read_gguf=lambda config: {"nope_layers": tuple(every_nth(layers_of(config, "block_count"), 4))},
)
