"""Families whose MLP is a mixture of experts, of which a router chooses some for each token: Mixtral,
Granite 3 with experts, OLMoE, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer, Forward
from ...isa.dims import MOST_EXPERTS
from ...isa.operations.experts import GATE_LIMIT, GATE_SLOPE
from ..config import Keys, ModelConfig
from .family import Family, Weight, of_layer
from .like_llama import GRANITE
from .llama import AFTER, ATTENTION_BIAS, BEFORE, qkv_phases
from .verbs import add_experts, add_matmul, attention, experts, gated_experts, norm, route
from .windows import every_nth, layers_of, read_gguf_windows, windows

B = Buffer


def forward(c: ModelConfig, f: Family) -> Forward:
    """Llama's attention, then experts."""
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            *qkv_phases(c, f),
            attention("attention", inputs=B.Q, sinks=f.sinks, output=B.ATTN),
            add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=c.bias(B.B_O), output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            route("route", inputs=B.H, router=B.W_ROUTER, bias=c.bias(B.B_ROUTER), output=B.ROUTES),
            gated_experts("experts_gate_up", B.H, weights=B.W_GATE_UP, bias=c.bias(B.B_GATE_UP), output=B.ACT),
            experts("experts_down", inputs=B.ACT, weights=B.W_DOWN, bias=c.bias(B.B_DOWN), output=B.EXPERTS_OUT),
            add_experts("combine", inputs=B.EXPERTS_OUT, weights=B.W_DOWN, output=B.X),
        ],
        AFTER,
    )


_GATE_UP, _DOWN = "mlp.experts.{expert}.gate_proj mlp.experts.{expert}.up_proj", "mlp.experts.{expert}.down_proj"


def _weights(router: str = "mlp.gate", gate_up: str = _GATE_UP, down: str = _DOWN) -> dict[Buffer, Weight]:
    """The weights of experts. The arguments are names in safetensors files. GGUF files have one tensor for all experts
    of a layer."""
    return {
        B.W_ROUTER: of_layer(router, "ffn_gate_inp"),
        B.W_GATE_UP: of_layer(gate_up, "ffn_gate_exps ffn_up_exps"),
        B.W_DOWN: of_layer(down, "ffn_down_exps"),
    }


# Keys of config.json: for the number of experts in files of transformers 4 and 5, for training, and for whether the
# model also returns the router's logits.
_KEYS = (
    "num_local_experts num_experts num_experts_per_tok output_router_logits router_aux_loss_coef router_jitter_noise"
)
_GGUF_KEYS = "expert_count expert_used_count"


def counts(config: Keys) -> dict[str, Any]:
    """Read how many experts a layer has and how many a token uses. In GGUF files, the width of an expert may have a key
    of its own, which is then read too."""
    every, used, width = ("num_local_experts", "num_experts"), "num_experts_per_tok", ""
    if config.get("expert_count") is not None:
        every, used, width = ("expert_count",) * 2, "expert_used_count", "expert_feed_forward_length"
    name = next((key for key in every if config.get(key) is not None), every[0])
    count, per_token = config.count(name), config.count(used)
    for key in every:
        config.only(key, count)
    if not 0 < per_token <= count <= MOST_EXPERTS:
        raise MegakernelError(
            f"{config.source}: {config.prefix}{name} = {count} with {config.prefix}{used} = {per_token} is not "
            f"supported: a layer has at most {MOST_EXPERTS} experts, and a token uses 1 or more of them"
        )
    own = {"ffn": config.count(width)} if width and config.get(width) is not None else {}
    return {"experts": count, "experts_per_token": per_token, **own}


def read(config: Keys) -> dict[str, Any]:
    """Read the experts and the sliding window. If config.json lacks the window's key, there is no window."""
    window = {"window": config.count("sliding_window")} if config.get("sliding_window") else {}
    return window | counts(config)


MIXTRAL = Family(
    name="mixtral",
    models="Mixtral 8x7B and 8x22B",
    architecture="MixtralForCausalLM",
    gguf=("llama",),
    forward=forward,
    weights=_weights(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{expert}.w1 block_sparse_moe.experts.{expert}.w3",
        "block_sparse_moe.experts.{expert}.w2",
    ),
    fixed={"normalised_routes": True},
    read=read,
    keys=f"{_KEYS} sliding_window",
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    read_gguf=counts,
    gguf_keys=_GGUF_KEYS,
)


GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    models="Granite 3 with experts, such as granite-3.1-1b-a400m",
    architecture="GraniteMoeForCausalLM",
    gguf=("granitemoe",),
    forward=forward,
    weights=_weights(
        "block_sparse_moe.router.layer",
        "block_sparse_moe.input_linear block_sparse_moe.input_linear",
        "block_sparse_moe.output_linear",
    ),
    fixed={"normalised_routes": True},
    fields={name: key for name, key in GRANITE.fields.items() if name != "mlp_bias"},
    read=counts,
    keys=_KEYS,
    read_gguf=counts,
    gguf_keys=_GGUF_KEYS,
)


OLMOE = Family(
    name="olmoe",
    models="OLMoE-1B-7B, on CPUs only",
    architecture="OlmoeForCausalLM",
    gguf=("olmoe",),
    forward=forward,
    weights=_weights(),
    adjacent=(),
    fixed={"whole_norms": True},
    fields=ATTENTION_BIAS | {"normalised_routes": ("norm_topk_prob", False)},
    only={"clip_qkv": ()},
    read=counts,
    keys=_KEYS,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    read_gguf=counts,
    gguf_keys=_GGUF_KEYS,
)


def read_qwen3(config: Keys) -> dict[str, Any]:
    """Read the numbers of experts and, if use_sliding_window is true, the window, which then holds for all layers."""
    windowed = config.flag("use_sliding_window") and config.raw.get("sliding_window", 4096) is not None
    return ({"window": config.count("sliding_window", 4096)} if windowed else {}) | counts(config)


QWEN3_MOE = Family(
    name="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B and 480B-A35B, and the text part of Qwen3-VL with "
    "experts (`Qwen3VLMoeForConditionalGeneration`)",
    architecture="Qwen3MoeForCausalLM",
    inside=("Qwen3VLMoeForConditionalGeneration",),
    inside_keys={"norm_topk_prob": True},
    gguf=("qwen3moe", "qwen3vlmoe"),
    forward=forward,
    head_norms=True,
    weights=_weights(),
    adjacent=(),
    fields=ATTENTION_BIAS | {"normalised_routes": ("norm_topk_prob", False), "ffn": ("moe_intermediate_size", None)},
    only={"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "use_qk_norm": (True,)},
    read=read_qwen3,
    keys=f"{_KEYS} layer_types max_window_layers sliding_window use_sliding_window",
    defaults={"max_position_embeddings": 32768},
    read_gguf=lambda config: counts(config) | {"normalised_routes": True},
    gguf_keys=f"{_GGUF_KEYS} expert_feed_forward_length",
)


def read_gpt_oss(config: Keys) -> dict[str, Any]:
    """Read the windows and the experts. The type in which experts are stored may be MXFP4."""
    if (quantised := config.get("quantization_config")) is not None:
        given = quantised if isinstance(quantised, dict) else {"quant_method": quantised}
        Keys(given, f"{config.source}: quantization_config").only("quant_method", "mxfp4")
    config.only("experts_per_token", config.get("num_experts_per_tok"))
    return windows(config, every_nth(layers_of(config), 2), 128) | counts(config)


def read_gguf_gpt_oss(config: Keys) -> dict[str, Any]:
    """Read the sliding windows and the numbers of experts. A file must have windows, and one RoPE for all layers."""
    config.only("rope.freq_base_swa", config.number("rope.freq_base", 1e4))
    config.count("attention.sliding_window")
    return read_gguf_windows(config, 2) | counts(config)


GPT_OSS = Family(
    name="gpt_oss",
    models="gpt-oss-20b and 120b",
    architecture="GptOssForCausalLM",
    gguf=("gpt-oss",),
    forward=forward,
    sinks=True,
    weights=_weights("mlp.router")
    | {
        B.MLP_NORM: of_layer("post_attention_layernorm", "post_attention_norm"),
        B.SINKS: of_layer("self_attn.sinks", "attn_sinks.weight", ""),
        B.B_ROUTER: of_layer("mlp.router", "ffn_gate_inp", ".bias"),
        B.B_GATE_UP: of_layer(_GATE_UP, "ffn_gate_exps ffn_up_exps", ".bias"),
        B.B_DOWN: of_layer(_DOWN, "ffn_down_exps", ".bias"),
    },
    alternate=True,
    adjacent=(),
    fixed={"normalised_routes": True, "clipped_gates": True, "mlp_bias": True},
    fields=dict.fromkeys(("qkv_bias", "o_bias"), ("attention_bias", True)),
    only={"swiglu_alpha": (GATE_SLOPE,), "swiglu_limit": (GATE_LIMIT,)},
    read=read_gpt_oss,
    keys=f"{_KEYS} experts_per_token initial_context_length layer_types quantization_config sliding_window",
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "head_dim": 64,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    read_gguf=read_gguf_gpt_oss,
    gguf_keys=f"{_GGUF_KEYS} attention.sliding_window_pattern expert_feed_forward_length rope.freq_base_swa",
)
