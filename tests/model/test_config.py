"""Tests of reading config.json: every known spelling of a setting is read, and an error names any other setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig as HfConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megakernel.errors import MegakernelError
from megakernel.model import ModelConfig, Rope, RopeKind
from megakernel.model.hf_config import parse_hf_config, read_hf_config
from megakernel.model.rope import inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PLAIN = ModelConfig(300, 64, 100, 2, 4, 2, 16, 512, 1e-5, Rope(), family="llama")
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
FULL, WINDOW = "full_attention", "sliding_attention"


def parse(**changes: Any) -> ModelConfig:
    return parse_hf_config({**BASE, **changes}, "config.json")


UNUSED = {"use_sliding_window": False, "layer_types": [FULL, FULL]}


@pytest.mark.parametrize(
    ("spelling", "read"),
    [
        ({}, {}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, {"heads": 1, "kv_heads": 1, "head_dim": 64}),
        ({"mlp_bias": True, "tie_word_embeddings": True}, {"mlp_bias": True, "tied": True}),
        ({"bos_token_id": 1, "eos_token_id": [2, 3]}, {"bos_id": 1, "eos_ids": (2, 3)}),
        ({"num_key_value_heads": None, "head_dim": 24}, {"kv_heads": 4, "head_dim": 24}),
        # Qwen2 always has QKV biases; Qwen3 has biases only if attention_bias is true. The files of both may name a
        # sliding window that the model does not use.
        (QWEN2, {"qkv_bias": True}),
        ({**QWEN2, **UNUSED, "sliding_window": 256, "max_window_layers": 1}, {"qkv_bias": True}),
        ({**QWEN3, **UNUSED, "sliding_window": None, "max_window_layers": 2, "attention_bias": False}, {}),
        ({**QWEN3, "head_dim": 24, "attention_bias": True}, {"head_dim": 24, "qkv_bias": True, "o_bias": True}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope": Rope(1e4, RopeKind.LINEAR, 4.0)}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope": Rope(7.0)}),
        ({"quantization_config": None, "sliding_window": None, "use_flash": False, "pretraining_tp": 1}, {}),
    ],
)
def test_what_a_file_says_is_read(spelling: dict[str, Any], read: dict[str, Any]) -> None:
    family = spelling.get("model_type", "llama")
    assert parse(**spelling) == replace(PLAIN, **{"family": family} | read)


def test_mistral_has_a_window_unless_it_says_that_it_has_none() -> None:
    assert parse(**MISTRAL, sliding_window=None, head_dim=24) == replace(PLAIN, family="mistral", head_dim=24)
    for window in ({}, {"sliding_window": 2048}):
        with pytest.raises(MegakernelError, match=r"sliding_window = (4096|2048) is not supported, only null"):
            parse(**MISTRAL, **window)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 5e5, "partial_rotary_factor": 1.0},
    ],
)
def test_rope_spellings(spelling: dict[str, Any]) -> None:
    assert parse(**spelling).rope == Rope(5e5, RopeKind.LLAMA3, 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("architectures", {"architectures": ["MistralForCausalLM"]}),
        ("model_type", {"model_type": "mistral"}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("is_causal", {"is_causal": False}),
        ("pretraining_tp", {"pretraining_tp": 2}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
        ("sliding_window", {"sliding_window": 4096}),
        ("use_sliding_window", {**QWEN2, "use_sliding_window": True}),
        ("layer_types", {**QWEN2, "layer_types": [FULL, WINDOW]}),
        ("use_sliding_window", {**QWEN3, "use_sliding_window": True}),
        ("layer_types", {**QWEN3, "layer_types": [WINDOW, FULL]}),
        ("mlp_bias", {**QWEN3, "mlp_bias": True}),
        ("attention_bias", {**QWEN2, "attention_bias": True}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0}),
        ("some_new_key", {"some_new_key": 1}),
        ("yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
        ("longrope", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}),
        ("low_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}),
        ("factor", {"rope_scaling": {"type": "linear"}}),
        ("factor", {"rope_scaling": {"type": "linear", "factor": 0}}),
        ("beta_fast", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}),
        ("rope_type", {"rope_scaling": {"factor": 2.0}}),
        ("rope_theta", {"rope_theta": float("nan")}),
        ("rope_theta", {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
        ("rms_norm_eps", {"rms_norm_eps": "small"}),
        ("rms_norm_eps", {"rms_norm_eps": 10**400}),
        ("heads", {"num_key_value_heads": 3}),
        ("head size", {"head_dim": 12}),
        ("hidden_size", {"hidden_size": 66}),
        ("num_attention_heads", {"num_attention_heads": 0}),
        ("layers", {"num_hidden_layers": 0}),
        ("layers", {"num_hidden_layers": 10**8}),
        ("hidden_size", {"hidden_size": 10**400}),
        ("vocab", {"vocab_size": 2 * 10**9}),
        ("vocab_size", {"vocab_size": None}),
        ("intermediate_size", {"intermediate_size": 1.5}),
        ("mlp_bias", {"mlp_bias": "yes"}),
        ("eos", {"eos_token_id": 300}),
        ("bos_token_id", {"bos_token_id": "one"}),
    ],
)
def test_refused_by_name(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MegakernelError, match=f"^config.json.*{named}"):
        parse(**changes)


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert read_hf_config(tmp_path).eos_ids == (5, 9)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ', "\x00"])
def test_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MegakernelError, match=r"config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, "factor": 32.0},
        {**LLAMA3, "original_max_position_embeddings": 128},
    ],
)
def test_frequencies_are_those_of_transformers(head_dim: int, scaling: dict[str, Any]) -> None:
    parameters = {**scaling, "rope_theta": 500000.0}
    raw = {**BASE, "head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": parameters}
    with torch.no_grad():
        theirs = LlamaRotaryEmbedding(HfConfig(**raw)).inv_freq.numpy()
    ours = inverse_frequencies(parse_hf_config(raw, "").rope, head_dim)
    assert ours.dtype == np.float32
    # torch does not round powers correctly, so a few frequencies differ by one unit in the last place.
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-23, atol=0)
    assert (ours == theirs).mean() >= 0.9
