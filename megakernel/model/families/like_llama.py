"""Families with Llama's phases. Their files have other keys and defaults, or other names or orders of weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer
from ..config import Keys
from .family import Family, of_layer
from .llama import ATTENTION_BIAS, BIASES
from .windows import every_nth, layers_of, windows

GELU = "gelu_pytorch_tanh"


def scaled_embeddings(hidden: int) -> dict[str, Any]:
    """Gemma multiplies embeddings by the square root of their size. `check_config` later refuses a size below 1."""
    return {"embedding_multiplier": math.sqrt(max(hidden, 1))}


_ONE_GATE_UP = of_layer("mlp.gate_up_proj mlp.gate_up_proj", "ffn_up ffn_up")

CWM = Family(
    name="cwm",
    models="CWM 32B",
    fields={"mlp_bias": ("mlp_bias", False)},
    read=lambda config: windows(config, layers_of(config)[::4], 8192),
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128},
)

ERNIE4_5 = Family(
    name="ernie4_5",
    models="ERNIE-4.5-0.3B",
    gguf=("ernie4_5",),
    adjacent=("safetensors", "gguf"),
    fields=dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), ("use_bias", False)),
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
)

EXAONE = Family(
    name="exaone",
    models="EXAONE 3.0 and 3.5",
    also=("LlamaForCausalLM",),
    gguf=("exaone",),
    fields=BIASES,
    aliases={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
    | {"activation_function": "hidden_act"},
    renames={
        "transformer.wte.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".attn.attention.out_proj.": ".self_attn.o_proj.",
        ".attn.attention.": ".self_attn.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".mlp.c_fc_0.": ".mlp.gate_proj.",
        ".mlp.c_fc_1.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    },
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
)

GEMMA = Family(
    name="gemma",
    models="Gemma 2B and 7B",
    gguf=("gemma",),
    gelu=True,
    norms_minus_one=True,
    fixed={"rounds_embedding": True},
    only={"hidden_activation": (GELU,)},
    read=lambda config: scaled_embeddings(config.count("hidden_size")),
    defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    # Early files say "gelu" but mean its approximation by tanh, so other software also uses the approximation.
    activations=(GELU, "gelu"),
)

GLM = Family(
    name="glm",
    models="GLM-4-9B-chat",
    weights={Buffer.W_GATE_UP: _ONE_GATE_UP},
    adjacent=("safetensors", "gguf"),
    fields={"qkv_bias": ("attention_bias", True)},
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
    | {"head_dim": 128},
)

# Keys of Granite's multipliers. ModelConfig makes them part of other numbers.
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
GRANITE = Family(
    name="granite",
    models="Granite 3 without experts",
    gguf=("granite",),
    adjacent=("gguf",),
    fields=BIASES | {name: (name, 1.0) for name in _MULTIPLIERS},
)


def _attention_only(config: Keys) -> dict[str, Any]:
    """Refuse Granite 4.0 with Mamba layers, without RoPE or with experts."""
    config.names("layer_types", "attention", "full_attention")
    config.names("layers_block_type", "attention", "full_attention")
    config.only("position_embedding_type", "rope", default="nope")
    config.only("num_local_experts", 0, default=8)
    if config.get("layer_types") is None and config.get("layers_block_type") is None:
        raise MegakernelError(f"{config.source} must have layer_types, whose entries must all be attention, not Mamba")
    return {}


GRANITE_HYBRID = replace(
    GRANITE,
    name="granitemoehybrid",
    models="Granite 4.0 without Mamba and without experts, such as granite-4.0-micro (its GGUF files are `granite`)",
    gguf=(),
    weights={
        Buffer.W_GATE_UP: of_layer("shared_mlp.input_linear " * 2, "ffn_gate ffn_up"),
        Buffer.W_DOWN: of_layer("shared_mlp.output_linear", "ffn_down"),
    },
    fields={name: key for name, key in GRANITE.fields.items() if name != "mlp_bias"}
    | {"ffn": ("shared_intermediate_size", 1024)},
    only={"normalization_function": ("rmsnorm",)},
    read=_attention_only,
    keys="init_method mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand "
    "mamba_n_groups mamba_n_heads mamba_proj_bias num_experts_per_tok time_step_limit",
)

HUNYUAN = Family(
    name="hunyuan_v1_dense",
    models="Hunyuan 0.5B to 7B",
    also=("HunYuanDenseV1ForCausalLM",),
    gguf=("hunyuan-dense",),
    head_norms=True,
    weights={Buffer.QK_NORM: of_layer("self_attn.query_layernorm self_attn.key_layernorm", "attn_q_norm attn_k_norm")},
    fixed={"late_scales": True},
    fields=ATTENTION_BIAS,
    only={"norm_type": ("rms",), "num_experts": (1,), "use_qk_norm": (True,), "use_rotary_pos_emb": (True,)},
    aliases={"attention_head_dim": "head_dim"},
    # These keys concern images, tasks, or layers that share K and V, which only models with `use_cla` have.
    keys="cla_share_factor class_num dense_list im_end_id im_newline_id im_start_id mask_init_id org_vocab_size pad_id "
    "pool_type sep_id text_end_id text_start_id",
    defaults={"rms_norm_eps": 1e-5, "alpha": 1.0},
)

INTERNLM3 = Family(
    name="internlm3",
    models="InternLM3-8B",
    also=("LlamaForCausalLM",),
    fields={"qkv_bias": ("qkv_bias", False), "o_bias": ("bias", False), "mlp_bias": ("bias", False)},
    aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "head_dim": 128},
)

IQUEST_CODER = Family(
    name="iquestcoder",
    models="IQuest-Coder-V1",
    also=("LlamaForCausalLM",),
    fields=BIASES,
    keys="max_window_layers sliding_window",
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128},
)

# GGUF files of the architecture "llama" may also contain Mistral models, because the forward pass is the same.
MISTRAL = Family(
    name="mistral",
    models="Mistral 7B, and the text part of Mistral-Small-3.1 (`Mistral3ForConditionalGeneration`)",
    inside=("Mistral3ForConditionalGeneration",),
    gguf=("llama", "mistral3"),
    adjacent=("gguf",),
    read=windows,
    defaults={"max_position_embeddings": 131072},
)

MINISTRAL = replace(MISTRAL, name="ministral", models="Ministral 8B")

MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    models="Ministral 3, with contexts of at most 16,384 tokens",
    read=lambda config: windows(config) if config.get("sliding_window") is not None else {},
    defaults={"max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
)


def _phi3(config: Keys) -> dict[str, Any]:
    """Read the sliding window. Refuse the RoPE kind "yarn", because other software treats it as "longrope"."""
    scaling = Keys(config.get("rope_parameters") or config.get("rope_scaling") or {}, config.source)
    for spelling in ("rope_type", "type"):
        scaling.only(spelling, "default", "longrope", "su")
    return windows(config) if config.get("sliding_window") else {}


PHI3 = Family(
    name="phi3",
    models="Phi-3, Phi-4, Phi-4-mini",
    gguf=("phi3",),
    weights={
        Buffer.W_QKV: of_layer("self_attn.qkv_proj " * 3, "attn_qkv " * 3),
        Buffer.W_GATE_UP: _ONE_GATE_UP,
    },
    only={"full_attn_mod": (1,), "interpolate_factor": (1,)},  # in the files of Phi-4-mini; no program reads them
    read=_phi3,
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    | {"partial_rotary_factor": 1.0},
)


def _qwen2(config: Keys) -> dict[str, Any]:
    """Read the sliding window. If it is turned on, the layers from number `max_window_layers` on have it."""
    if not config.flag("use_sliding_window"):
        config.names("layer_types", "full_attention")
        return {}
    return windows(config, layers_of(config)[: max(config.count("max_window_layers", 28), 0)])


QWEN2 = Family(
    name="qwen2",
    models="Qwen2, Qwen2.5, and the text part of Qwen2-VL and Qwen2.5-VL",
    inside=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    gguf=("qwen2", "qwen2vl"),
    fixed={"qkv_bias": True},
    read=_qwen2,
    keys="max_window_layers sliding_window",
    defaults={"max_position_embeddings": 32768},
)

QWEN3 = Family(
    name="qwen3",
    models="Qwen3, and the text part of Qwen3-VL 2B to 32B (`Qwen3VLForConditionalGeneration`)",
    inside=("Qwen3VLForConditionalGeneration",),
    gguf=("qwen3", "qwen3vl"),
    head_norms=True,
    fields=ATTENTION_BIAS,
    read=_qwen2,
    keys=QWEN2.keys,
    defaults={"max_position_embeddings": 32768},
)

SEED_OSS = Family(
    name="seed_oss",
    models="Seed-OSS-36B",
    gguf=("seed_oss",),
    # In GGUF files, the norm before the MLP has the name post_attention_norm, because it follows attention.
    weights={Buffer.MLP_NORM: of_layer("post_attention_layernorm", "post_attention_norm")},
    fields=BIASES | {"qkv_bias": ("attention_bias", True), "o_bias": ("attention_out_bias", False)},
    defaults={"max_position_embeddings": 524288, "head_dim": 128},
)


def _smollm3(config: Keys) -> dict[str, Any]:
    """Read which layers have RoPE: those with a 1 in `no_rope_layers` or, if it is absent, all except every n-th."""
    layers, interval = layers_of(config), config.count("no_rope_layer_interval", 4)
    rotated = None if config.get("no_rope_layers") is None else config.numbers("no_rope_layers")
    if interval < 1 or (rotated is not None and len(rotated) < len(layers)):
        raise MegakernelError(
            f"{config.source}: no_rope_layer_interval must be positive, and no_rope_layers needs {len(layers)} entries"
        )
    nope = every_nth(layers, interval) if rotated is None else (i for i in layers if not rotated[i])
    return {"nope_layers": tuple(nope)}


SMOLLM3 = Family(
    name="smollm3",
    models="SmolLM3-3B",
    gguf=("smollm3",),
    adjacent=("gguf",),
    fields=BIASES,
    read=_smollm3,
    keys="max_window_layers sliding_window",
    defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
)
