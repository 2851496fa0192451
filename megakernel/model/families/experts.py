"""Families whose MLP is a mixture of experts, of which a router chooses some for each token: Mixtral, Granite 3 with
experts, OLMoE, Qwen2-MoE, Qwen3-MoE, GLM-4.5, dots.llm1, ERNIE 4.5 and gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer
from ...isa.dims import MOST_EXPERTS
from ...isa.operations.experts import GATE_LIMIT, GATE_SLOPE
from ..config import Keys
from .family import Family, Weight, of_layer
from .like_llama import ERNIE4_5, GRANITE
from .llama import ATTENTION_BIAS
from .windows import every_nth, layers_of, windows

B = Buffer


_GATE_UP, _DOWN = "mlp.experts.{expert}.gate_proj mlp.experts.{expert}.up_proj", "mlp.experts.{expert}.down_proj"


def _weights(router: str = "mlp.gate", gate_up: str = _GATE_UP, down: str = _DOWN) -> dict[Buffer, Weight]:
    """Return the tensor names of the router and of the experts. The arguments are names in safetensors files. In GGUF
    files, the names are the same for all families, and one tensor has the weights of all experts of a layer."""
    return {
        B.W_ROUTER: of_layer(router, "ffn_gate_inp"),
        B.W_GATE_UP: of_layer(gate_up, "ffn_gate_exps ffn_up_exps"),
        B.W_DOWN: of_layer(down, "ffn_down_exps"),
    }


def counts(config: Keys) -> dict[str, Any]:
    """Read how many experts a layer has (two names, by version of transformers) and how many a token uses. GGUF files
    have the width of an expert under the same name in all families."""
    every, used = ("num_local_experts", "num_experts"), "num_experts_per_tok"
    name = next((key for key in every if config.get(key) is not None), every[0])
    count, per_token = config.count(name), config.count(used)
    for key in every:
        config.only(key, count)
    if not 0 < per_token <= count <= MOST_EXPERTS:
        raise MegakernelError(
            f"{config.source}: {config.name(name)} = {count} with {config.name(used)} = {per_token} is not "
            f"supported: a layer has at most {MOST_EXPERTS} experts, and a token uses 1 or more of them"
        )
    own = {"ffn": config.count("moe_intermediate_size")} if config.gguf else {}
    return {"experts": count, "experts_per_token": per_token, **own}


MIXTRAL = Family(
    name="mixtral",
    models="Mixtral 8x7B and 8x22B",
    gguf=("llama",),
    adjacent=("gguf",),
    weights=_weights(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{expert}.w1 block_sparse_moe.experts.{expert}.w3",
        "block_sparse_moe.experts.{expert}.w2",
    ),
    fixed={"normalised_routes": True},
    read=lambda config: counts(config) | (windows(config) if config.get("sliding_window") else {}),
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)


GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    models="Granite 3 with experts, such as granite-3.1-1b-a400m",
    gguf=("granitemoe",),
    weights=_weights(
        "block_sparse_moe.router.layer",
        "block_sparse_moe.input_linear block_sparse_moe.input_linear",
        "block_sparse_moe.output_linear",
    ),
    fixed={"normalised_routes": True},
    fields={name: key for name, key in GRANITE.fields.items() if name != "mlp_bias"},
    read=counts,
)


OLMOE = Family(
    name="olmoe",
    models="OLMoE-1B-7B, on CPUs only",
    gguf=("olmoe",),
    weights=_weights(),
    fixed={"whole_norms": True},
    fields=ATTENTION_BIAS | {"normalised_routes": ("norm_topk_prob", False)},
    read=counts,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)


def read_qwen3(config: Keys) -> dict[str, Any]:
    """Read the numbers of experts, and the window that all layers have if `use_sliding_window` is true."""
    windowed = config.flag("use_sliding_window") and config.get("sliding_window", 4096) is not None
    return ({"window": config.count("sliding_window", 4096)} if windowed else {}) | counts(config)


QWEN3_MOE = Family(
    name="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B and 480B-A35B, and the text part of Qwen3-VL with "
    "experts (`Qwen3VLMoeForConditionalGeneration`)",
    inside=("Qwen3VLMoeForConditionalGeneration",),
    inside_keys={"norm_topk_prob": True},
    gguf=("qwen3moe", "qwen3vlmoe"),
    head_norms=True,
    weights=_weights(),
    fields=ATTENTION_BIAS | {"normalised_routes": ("norm_topk_prob", False), "ffn": ("moe_intermediate_size", None)},
    only={"decoder_sparse_step": (1,), "use_qk_norm": (True,)},
    read=read_qwen3,
    keys="layer_types max_window_layers sliding_window",
    defaults={"max_position_embeddings": 32768},
)


def _pieces(config: Keys, routed: dict[str, Any], shared: int, layers: int, dense: int) -> dict[str, Any]:
    """Add two MLPs to the sizes of experts in `routed`: one of width `shared` that all tokens use, and one of width
    `dense`, which replaces the experts in the first `layers` layers. Pieces of both MLPs count as experts."""
    more, dense = -(-shared // max(routed["ffn"], 1)), dense if layers else 0
    every, used = routed["experts"] + more, routed["experts_per_token"] + more
    if min(shared, layers, dense) < 0 or dense > routed["ffn"] * used or every > MOST_EXPERTS:
        raise MegakernelError(
            f"{config.source}: {every} experts, and {layers} layers whose only MLP has width {dense}, are not "
            f"supported: the limits are {MOST_EXPERTS} experts, and an MLP of width {routed['ffn'] * used}"
        )
    counted = {"experts": every, "experts_per_token": used, "shared_experts": more}
    return routed | counted | {"shared_ffn": shared, "dense_layers": layers, "dense_ffn": dense}


def read_pieces(config: Keys, shared: int, layers: int) -> dict[str, Any]:
    """Read sizes of experts. By default, all tokens use `shared` experts, and the first `layers` layers have none."""
    config.only("moe_layer_end_index", -1, config.count("num_hidden_layers") - 1)
    ffn, layers = config.count("moe_intermediate_size"), config.count("first_k_dense_replace", layers)
    wide = config.count("shared_expert_intermediate_size", ffn * config.count("n_shared_experts", shared))
    return _pieces(config, counts(config) | {"ffn": ffn}, wide, layers, config.count("intermediate_size"))


GLM4_MOE = Family(
    name="glm4_moe",
    models="GLM-4.5, 4.6 and 4.7, and GLM-4.5-Air",
    gguf=("glm4moe",),
    weights=_weights()
    | {
        B.MLP_NORM: of_layer("post_attention_layernorm", "post_attention_norm"),
        B.B_ROUTER: of_layer("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", ""),
    },
    shared={
        B.W_GATE_UP: of_layer("mlp.shared_experts.gate_proj mlp.shared_experts.up_proj", "ffn_gate_shexp ffn_up_shexp"),
        B.W_DOWN: of_layer("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    },
    fixed={"sigmoid_routes": True, "choice_bias": True},
    fields={"qkv_bias": ("attention_bias", False), "head_norms": ("use_qk_norm", False)}
    | {"normalised_routes": ("norm_topk_prob", True), "route_scale": ("routed_scaling_factor", 1.0)},
    only={"n_group": (1,), "topk_group": (1,), "expert_gating_func": (0, 2)},
    read=lambda config: read_pieces(config, 1, 1),
    keys="num_nextn_predict_layers",
    aliases={"n_routed_experts": "num_local_experts"},
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
)

DOTS1 = replace(
    GLM4_MOE,
    name="dots1",
    models="dots.llm1",
    gguf=("dots1",),
    head_norms=True,
    weights=_weights() | {B.B_ROUTER: GLM4_MOE.weights[B.B_ROUTER]},
    fields=ATTENTION_BIAS
    | {"normalised_routes": ("norm_topk_prob", False), "route_scale": ("routed_scaling_factor", 1.0)},
    only={**GLM4_MOE.only, "scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",)},
    read=lambda c: read_pieces(c, 0, 0) | windows(c, layers_of(c)[: c.count("max_window_layers", 62)]),
    keys=f"{GLM4_MOE.keys} ep_size seq_aux use_sliding_window",
    defaults={},
)

QWEN2_MOE = replace(
    GLM4_MOE,
    name="qwen2_moe",
    models="Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B",
    gguf=("qwen2moe",),
    weights=_weights() | {B.W_ROUTER: of_layer("mlp.gate mlp.shared_expert_gate", "ffn_gate_inp ffn_gate_inp_shexp")},
    renames={"mlp.shared_expert.": "mlp.shared_experts."},
    fixed={"shared_gate": True},
    fields={"qkv_bias": ("qkv_bias", True), "normalised_routes": ("norm_topk_prob", False)},
    only={"decoder_sparse_step": (1,), "expert_gating_func": (0, 1)},
    read=lambda config: read_pieces(config, 4, 0),
    keys="max_window_layers sliding_window",
    aliases={},
    defaults={"max_position_embeddings": 32768},
)

ERNIE4_5_MOE = replace(
    GLM4_MOE,
    name="ernie4_5_moe",
    models="ERNIE-4.5-21B-A3B and 300B-A47B",
    gguf=("ernie4_5-moe",),
    weights=_weights() | {B.B_ROUTER: of_layer("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias", "")},
    adjacent=("safetensors", "gguf"),
    inside_keys={"norm_topk_prob": True},
    fixed={"choice_bias": True},
    fields={"normalised_routes": ("norm_topk_prob", True)},
    only={
        "moe_gate": ("topk",),
        "moe_gate_act": ("softmax",),
        "moe_layer_interval": (1,),
        "expert_gating_func": (0, 1),
    },
    read=lambda config: read_pieces(config, 2, 1),
    keys=f"{GLM4_MOE.keys} moe_capacity moe_norm_min moe_use_aux_free",
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
    | {"moe_num_shared_experts": "n_shared_experts", "moe_layer_start_index": "first_k_dense_replace"},
    defaults=ERNIE4_5.defaults,
)


def read_gpt_oss(config: Keys) -> dict[str, Any]:
    """Read the sliding windows and the numbers of experts. No quantised type except MXFP4 may be declared."""
    if (quantised := config.get("quantization_config")) is not None:
        given = quantised if isinstance(quantised, dict) else {"quant_method": quantised}
        Keys(given, f"{config.source}: quantization_config").only("quant_method", "mxfp4")
    config.only("experts_per_token", config.get("num_experts_per_tok"))
    if config.gguf:  # a file must have windows, and one RoPE for all layers
        config.only("rope_local_base_freq", config.number("rope_theta"))
        config.count("sliding_window")
    return windows(config, every_nth(layers_of(config), 2), 128) | counts(config)


GPT_OSS = Family(
    name="gpt_oss",
    models="gpt-oss-20b and 120b",
    gguf=("gpt-oss",),
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
    fixed={"normalised_routes": True, "clipped_gates": True, "mlp_bias": True},
    fields=dict.fromkeys(("qkv_bias", "o_bias"), ("attention_bias", True)),
    only={"swiglu_alpha": (GATE_SLOPE,), "swiglu_limit": (GATE_LIMIT,)},
    read=read_gpt_oss,
    keys="initial_context_length",
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64}
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    },
)
