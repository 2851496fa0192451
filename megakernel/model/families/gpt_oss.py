"""gpt-oss: Llama's layers with sinks of attention, a sliding window in every other layer, and experts with biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer, Forward, Operation
from ...isa.operations.experts import GATE_LIMIT, GATE_SLOPE
from ..config import Keys, ModelConfig
from . import llama, mixtral, seed_oss
from .family import Family, Weight
from .windows import every_nth, read_gguf_windows, windows

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """Llama's phases with experts and sinks."""
    f = mixtral.with_experts(llama.forward(c))
    body = [replace(p, weights=B.SINKS) if p.operation is Operation.ATTENTION else p for p in f.body]
    return Forward.of(f.prologue, body, f.epilogue)


_SAME = {"normalised_routes": True, "clipped_gates": True}


def read(config: Keys) -> dict[str, Any]:
    """Read the biases of attention, the windows and the experts, whose gates have fixed limits."""
    config.only("swiglu_alpha", GATE_SLOPE)
    config.only("swiglu_limit", GATE_LIMIT)
    if (quantised := config.get("quantization_config")) is not None:
        given = quantised if isinstance(quantised, dict) else {"quant_method": quantised}
        Keys(given, f"{config.source}: quantization_config").only("quant_method", "mxfp4")
    config.only("experts_per_token", config.get("num_experts_per_tok"))
    attention = config.flag("attention_bias", True)
    return (
        {"qkv_bias": attention, "o_bias": attention, "mlp_bias": True}
        | windows(config, every_nth(config.count("num_hidden_layers"), 2), 128)
        | mixtral.counts(config, mixtral.EXPERTS, "num_experts_per_tok")
        | _SAME
    )


def read_gguf(config: Keys) -> dict[str, Any]:
    """Read the windows, which no file lacks, and the experts. All layers have the same RoPE."""
    config.only("rope.freq_base_swa", config.number("rope.freq_base", 1e4))
    config.count("attention.sliding_window")
    return (
        read_gguf_windows(config, 2)
        | {"ffn": config.count("expert_feed_forward_length")}
        | mixtral.read_gguf(config)
        | _SAME
    )


_LAYER = "model.layers.{}."

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    ("gpt-oss",),
    forward,
    llama.WEIGHTS
    | mixtral.expert_weights("mlp.router.weight", *(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")))
    | {
        B.MLP_NORM: seed_oss.SEED_OSS.weights[B.MLP_NORM],
        B.SINKS: Weight((_LAYER + "self_attn.sinks",), ("blk.{}.attn_sinks.weight",)),
        B.B_ROUTER: Weight((_LAYER + "mlp.router.bias",), ("blk.{}.ffn_gate_inp.bias",)),
        B.B_GATE_UP: Weight(
            tuple(f"{_LAYER}mlp.experts.{part}_proj_bias" for part in ("gate", "up")),
            tuple(f"blk.{{}}.ffn_{part}_exps.bias" for part in ("gate", "up")),
        ),
        B.B_DOWN: Weight((_LAYER + "mlp.experts.down_proj_bias",), ("blk.{}.ffn_down_exps.bias",)),
    },
    read,
    frozenset({*mixtral.EXPERTS, "num_experts_per_tok", "experts_per_token", "initial_context_length"})
    | {"attention_bias", "layer_types", "quantization_config", "sliding_window", "swiglu_alpha", "swiglu_limit"}
    | mixtral.HARMLESS,
    interleaved=False,
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
    read_gguf=read_gguf,
    gguf_keys=mixtral.GGUF_KEYS
    | {"attention.sliding_window_pattern", "expert_feed_forward_length", "rope.freq_base_swa"},
)
