"""Tests of reading config.json: every known spelling of a setting is read, and an error names any other setting."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_helpers import tiny_gguf
from transformers import LlamaConfig as HfConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megakernel.errors import MegakernelError
from megakernel.model import ModelConfig, Rope, RopeKind, load_config
from megakernel.model.families import FAMILIES, LACKING
from megakernel.model.hf_config import parse_hf_config, read_hf_config, read_sampling
from megakernel.model.rope import rope_table

BASE: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
BASE |= {"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4}
BASE |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
BASE |= {"torch_dtype": "bfloat16", "use_cache": True}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
YARN = {"type": "yarn", "factor": 4.0, ORIGINAL: 128}
SCALED = 0.1 * math.log(4.0) + 1
LONG = {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8, ORIGINAL: 128}
LONG_ROPE = Rope(1e4, RopeKind.LONGROPE, original_context=128, attention=math.sqrt(1 + math.log(4) / math.log(128)))
LONG_ROPE_READ = replace(LONG_ROPE, factors=(2.0,) * 8, short_factors=(1.0,) * 8)
PLAIN = ModelConfig(300, 64, 100, 2, 4, 2, 16, 512, 1e-5, Rope(), family="llama")
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2}
MIXTRAL |= {"num_local_experts": 8, "output_router_logits": True, "router_aux_loss_coef": 0.02, "rope_theta": 1e4}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 24}
MOE |= {"num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1, "mlp_only_layers": []}
FULL, WINDOW = "full_attention", "sliding_attention"


def parse(**changes: Any) -> ModelConfig:
    return parse_hf_config({**BASE, **changes}, "config.json")


SEED_OSS = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
ERNIE = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}
MINISTRAL = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 64}
MINISTRAL3 = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GLM = {"architectures": ["GlmForCausalLM"], "model_type": "glm"}
GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GRANITE4 = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "mamba_expand": 2}
GRANITE4 |= {"layer_types": ["attention"] * 2, "position_embedding_type": "rope", "num_local_experts": 0}
GRANITE4 |= {"shared_intermediate_size": 32, "normalization_function": "rmsnorm", "init_method": "mup"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "rope_theta": 1e4}
SMOLLM3 |= {"tie_word_embeddings": False}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_act": None, "head_dim": 16}
GEMMA = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
GEMMA |= {"head_dim": 16}
GEMMA_READ = {"embedding_multiplier": 8.0, "rounds_embedding": True, "tied": True}
# Further keys of Gemma 3's published files, with smaller sizes.
GEMMA3 |= {"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
GEMMA3 |= {"sliding_window": 64}
GEMMA3 |= {"attn_logit_softcapping": None, "cache_implementation": "hybrid", "sliding_window_pattern": 2}
GEMMA3_READ = {"embedding_multiplier": 8.0, "rounds_embedding": True, "post_norms": True, "tied": True}
GEMMA3_READ |= {"attention_multiplier": 1 / 16, "rope": Rope(1e6), "local_theta": 1e4}
GEMMA3_READ |= {"window": 64, "full_layers": (1,)}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "rope_theta": 5e5, "sliding_window": 64}
OLMO3 |= {"rope_scaling": YARN | {"attention_factor": 1.2}}
OLMO3_READ = {"post_norms": True, "whole_norms": True, "window": 64, "local_theta": 5e5}
OLMO3_READ |= {"rope": Rope(5e5, RopeKind.YARN, 4.0, 1.0, 32.0, 128, attention=1.2)}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 16}
GPT_OSS |= {"num_local_experts": 8, "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 128}
GPT_OSS |= {"swiglu_limit": 7.0, "router_aux_loss_coef": 0.9, "output_router_logits": False, "sliding_window": 64}
GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
GPT_OSS |= {"rope_theta": 150000, "rope_scaling": YARN | {"truncate": False}}
GPT_OSS_READ = {"experts": 8, "experts_per_token": 4, "normalised_routes": True, "clipped_gates": True}
GPT_OSS_READ |= {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "window": 64, "full_layers": (1,)}
GPT_OSS_ROPE = Rope(150000.0, RopeKind.YARN, 4.0, 1.0, 32.0, 128, truncate=False, attention=SCALED)
IMAGES = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {"a": 1}}
IMAGES |= {"image_token_index": 10, "spatial_merge_size": 2, "vision_feature_layer": -1, "projector_hidden_act": "gelu"}
UNUSED = {"use_sliding_window": False, "layer_types": [FULL, FULL]}
USED = {"use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("spelling", "read"),
    [
        ({}, {}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"layer_types": [FULL, FULL]}, {}),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, {"heads": 1, "kv_heads": 1, "head_dim": 64}),
        ({"mlp_bias": True, "tie_word_embeddings": True}, {"mlp_bias": True, "tied": True}),
        ({"bos_token_id": 1, "eos_token_id": [2, 3]}, {"bos_id": 1, "eos_ids": (2, 3)}),
        ({"num_key_value_heads": None, "head_dim": 24}, {"kv_heads": 4, "head_dim": 24}),
        # Qwen2 always has QKV biases; Qwen3 has biases only if attention_bias is true. The files of both may name a
        # sliding window that the model does not use.
        ({**QWEN2, **UNUSED, "sliding_window": 256, "max_window_layers": 1}, {"qkv_bias": True}),
        ({**QWEN3, **UNUSED, "sliding_window": None, "max_window_layers": 2, "attention_bias": False}, {}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope": Rope(1e4, RopeKind.LINEAR, 4.0)}),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope": Rope(7.0)}),
        *(
            (spelling, {"rope": Rope(5e5, RopeKind.LLAMA3, 8.0, 1.0, 4.0, 8192)})
            for spelling in (
                {"rope_theta": 5e5, "rope_scaling": LLAMA3},
                {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
                {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
                {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 5e5, "partial_rotary_factor": 1.0},
            )
        ),
        ({"quantization_config": None, "sliding_window": None, "moe_layers": [], "logit_cap": 0.0}, {}),
        # Further keys that occur in published files: SmolLM2, Falcon 3, Llama 1, Together's and fine-tuned models.
        ({"is_llama_config": True, "rope_interleaved": False, "neftune_noise_alpha": 5.0, "pretraining_tp": 2}, {}),
        ({"activation": "swiglu", "hidden_act": "swish", "model_max_length": 64, "max_sequence_length": 2048}, {}),
        ({"bos_token_id": 300, "eos_token_id": [300, 2, -7]}, {"eos_ids": (2,)}),  # the vocabulary has 300 tokens
        ({"bos_token_id": -1, "eos_token_id": -1, "pad_token_id": -1, "tokenizer_class": "LlamaTokenizer"}, {}),
        ({"eos_token_id": [-1, 7], "image_token_id": 9, "attention_dropout": 0.1}, {"eos_ids": (7,)}),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}, "_flash_attn_2_enabled": True, "flash_attn": True}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}, {}),
        ({"num_beams": 1, "typical_p": 1.0, "min_length": 0, "max_length": 20, "task_specific_params": {"a": 1}}, {}),
        ({"max_position_embeddings": None}, {"max_context": 2048}),
        # Programs disagree on whether to apply this window, unless the context fits into it. So it limits the context.
        ({"sliding_window": 128}, {"max_context": 128}),
        ({**MISTRAL, "head_dim": 24}, {"head_dim": 24, "window": 4096}),
        ({**MISTRAL, "max_position_embeddings": None, "sliding_window": None}, {"max_context": 131072}),
        (
            {**QWEN2, **USED, "layer_types": [WINDOW, FULL], "sliding_window": 256},
            {"qkv_bias": True, "window": 256, "full_layers": (1,)},
        ),
        ({**QWEN2, **USED, "max_window_layers": 2, "sliding_window": 256}, {"qkv_bias": True}),
        (SEED_OSS, {"qkv_bias": True, "head_dim": 128}),
        ({**SEED_OSS, "head_dim": 16, "attention_bias": False, "attention_out_bias": True}, {"o_bias": True}),
        (
            {**ERNIE, "use_bias": True, "rms_norm_eps": None},
            {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tied": True, "rope": Rope(5e5)},
        ),
        (
            {**MINISTRAL3, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512}},
            {"max_context": 128, "rope": Rope(1e4, RopeKind.YARN, 4.0, 1.0, 32.0, 128, attention=SCALED, ends=True)},
        ),
        ({**PHI3, "partial_rotary_factor": 0.75}, {"rope": Rope(dims=12)}),
        (
            {**PHI3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1}, "sliding_window": 100},
            {"window": 100},
        ),
        ({**PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "sliding_window": 262144}, {"window": 262144}),
        # The first files of Phi-3 have the older name of longrope, and later tools wrote the newer one beside it.
        ({**PHI3, "rope_scaling": {**LONG, "rope_type": "su"}}, {"rope": LONG_ROPE_READ}),
        ({"rope_scaling": {**LONG, "type": "su"}}, {"rope": LONG_ROPE_READ}),
        ({**GLM, "head_dim": 16}, {"qkv_bias": True, "rope": Rope(dims=8)}),
        ({**GLM, "head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0}, {}),
        ({**GEMMA, "hidden_act": "gelu", "hidden_activation": None}, GEMMA_READ),
        (
            {"model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_head_dim": 24}
            | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "factor": 1.0, "mscale": 1.0}},
            {"head_dim": 24, "late_scales": True, "rope": Rope(1e4 * 1000 ** (24 / 22))},
        ),
        (
            {**GEMMA3, "rope_theta": None, "rope_local_base_freq": None, "layer_types": [FULL, WINDOW]}
            | {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, WINDOW: {}}},
            GEMMA3_READ | {"rope": Rope(5e5, RopeKind.LINEAR, 8.0), "full_layers": (0,)},
        ),
        ({**GRANITE, "attention_multiplier": 0.25}, {"attention_multiplier": 0.25}),
        (
            {**GRANITE, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8, "mlp_bias": True},
            {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 1.0}
            | {"logits_scaling": 8.0, "mlp_bias": True},
        ),
        (MOE | {"use_qk_norm": True}, {"ffn": 24, "experts": 8, "experts_per_token": 3}),
        (
            {**MOE, "num_local_experts": 8, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 99},
            {"ffn": 24, "experts": 8, "experts_per_token": 3, "normalised_routes": True, "window": 99},
        ),
        (OLMO3, OLMO3_READ),
        (
            {**OLMO3, "rope_scaling": None, "layer_types": [FULL, FULL]},
            {"post_norms": True, "whole_norms": True, "rope": Rope(5e5)},
        ),
        (GPT_OSS, GPT_OSS_READ | {"rope": GPT_OSS_ROPE}),
        # Without settings, YaRN of the published models, and a window of 128 tokens.
        (
            {name: value for name, value in GPT_OSS.items() if name not in ("rope_scaling", "sliding_window")}
            | {"attention_bias": False},
            GPT_OSS_READ
            | {"rope": replace(GPT_OSS_ROPE, factor=32.0, original_context=4096, attention=0.1 * math.log(32.0) + 1)}
            | {"window": 128, "qkv_bias": False, "o_bias": False, "max_context": 131072},
        ),
        ({**SMOLLM3, "no_rope_layers": [0, 1, 0], "layer_types": [FULL, FULL]}, {"nope_layers": (0,)}),
        ({**SMOLLM3, "max_window_layers": 28, "sliding_window": 7, "use_sliding_window": False}, {}),
        ({**IMAGES, "text_config": {"model_type": "mistral", "sliding_window": None}}, {"family": "mistral"}),
        # The files of Qwen2-VL have no text_config.
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": {}}
            | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_token_id": 9},
            {"family": "qwen2", "qkv_bias": True},
        ),
        # EXAONE 3.5 has other names of keys. Granite 4.0 without Mamba has no experts.
        (
            {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_hidden_layers": None, "num_layers": 3}
            | {"rms_norm_eps": None, "layer_norm_epsilon": 0.01, "hidden_act": None, "activation_function": "silu"},
            {"layers": 3, "rms_eps": 0.01, "rope": Rope(5e5)},
        ),
        (
            {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window": None}
            | {"max_window_layers": 64, "reorder_qk_norm": True},  # transformers does not read these
            {"family": "exaone4", "post_norms": True},
        ),
        (GRANITE4, {"ffn": 32, "attention_multiplier": 1.0}),
        (
            {**IMAGES, "text_config": {"model_type": "ministral3"}, "tie_word_embeddings": True},
            {"family": "ministral3", "tied": True},
        ),
    ],
)
def test_what_a_file_says_is_read(spelling: dict[str, Any], read: dict[str, Any]) -> None:
    family = spelling.get("model_type", "llama")
    assert parse(**spelling) == replace(PLAIN, **{"family": family} | read)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("architectures", {"architectures": ["MistralForCausalLM"]}),
        ("model_type", {"model_type": "mistral"}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("is_causal", {"is_causal": False}),
        ("activation", {"activation": "gelu"}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
        ('quantization_config = {"quant_method": "fp', {"quantization_config": {"a": "b" * 99, "quant_method": "fp8"}}),
        ('quantization_config = {"quant_algo": "FP8"', {"quantization_config": {"a": "b" * 99, "quant_algo": "FP8"}}),
        ("layer_types", {"layer_types": [FULL, WINDOW]}),
        ("layer_types", {"layer_types": 2}),
        ("use_qk_norm", {**MOE, "use_qk_norm": False}),
        ("use_sliding_window", {"use_sliding_window": True}),
        ("max_context", {"sliding_window": -1}),
        ("sliding_window", {**MISTRAL, "sliding_window": "wide"}),
        ("layer_types", {**QWEN2, **USED, "layer_types": [WINDOW]}),
        ("sliding_window", {**QWEN2, **USED, "sliding_window": 0}),
        ("equal distances", {**MINISTRAL, "num_hidden_layers": 5, "layer_types": [WINDOW, FULL, FULL, WINDOW, FULL]}),
        ("layer_types", {**QWEN2, "layer_types": [FULL, WINDOW]}),
        ("decoder_sparse_step", {**MOE, "decoder_sparse_step": 2}),
        ("mlp_only_layers", {**MOE, "mlp_only_layers": [1]}),
        ("num_experts is missing|num_local_experts is missing", {**MOE, "num_experts": None}),
        ("num_experts = 9", {**MOE, "num_local_experts": 8, "num_experts": 9}),
        ("num_experts_per_tok = 9", {**MOE, "num_experts_per_tok": 9}),
        ("num_local_experts = 513", {**MIXTRAL, "num_local_experts": 513}),
        ("layer_types", {**MINISTRAL, "layer_types": [FULL, "chunked_attention"]}),
        ("quantization_config", {**IMAGES, "text_config": {"model_type": "mistral"}, "quantization_config": {"a": 1}}),
        ("text_config", {**IMAGES, "text_config": "mistral"}),
        ("partial_rotary_factor", {**PHI3, "partial_rotary_factor": 0.01}),
        ("RoPE rotates 5 elements of a head, but needs an even number", {**PHI3, "partial_rotary_factor": 0.33}),
        ("RoPE factors must be 4", {**PHI3, "partial_rotary_factor": 0.5, "rope_scaling": LONG}),
        ("yarn", {**PHI3, "rope_scaling": YARN}),
        ("full_attn_mod", {**PHI3, "full_attn_mod": 2}),
        ("final_logit_softcapping", {**GEMMA3, "final_logit_softcapping": 30.0}),
        ("hidden_activation", {**GEMMA3, "hidden_activation": "gelu"}),
        ("hidden_act", {**GEMMA3, "hidden_act": "silu"}),
        ("sliding_window_pattern", {**GEMMA3, "sliding_window_pattern": 0}),
        ("sliding_window is null", {**OLMO3, "sliding_window": None}),
        ("swiglu_limit", {**GPT_OSS, "swiglu_limit": 5.0}),
        ("quant_method", {**GPT_OSS, "quantization_config": {"quant_method": "awq"}}),
        ("quant_method", {**GPT_OSS, "quantization_config": ["mxfp4"]}),
        ("query_pre_attn_scalar", {**GEMMA3, "query_pre_attn_scalar": -1}),
        ("sliding_attention: rope_type", {**GEMMA3, "rope_parameters": {FULL: {}, WINDOW: {"rope_type": "linear"}}}),
        ("use_bidirectional_attention", {**GEMMA3, "use_bidirectional_attention": True}),
        ("layer_types", {**GRANITE4, "layer_types": ["attention", "mamba"]}),
        ("must have layer_types", {**GRANITE4, "layer_types": None}),
        ("position_embedding_type", {**GRANITE4, "position_embedding_type": "nope"}),
        ("num_local_experts", {**GRANITE4, "num_local_experts": 64}),
        ("num_layers and num_hidden_layers", {"model_type": "exaone", "architectures": None, "num_layers": 3}),
        ("residual_multiplier", {**GRANITE, "residual_multiplier": 0}),
        ("logits_scaling", {**GRANITE, "logits_scaling": "8"}),
        ("no_rope_layers", {**SMOLLM3, "no_rope_layers": [1]}),
        ("no_rope_layer_interval", {**SMOLLM3, "no_rope_layer_interval": 0}),
        ("use_sliding_window", {**SMOLLM3, "use_sliding_window": True}),
        ("llama_4_scaling_beta", {"rope_parameters": {**LLAMA3, "llama_4_scaling_beta": 0.1}}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0}),
        ("some_new_key", {"some_new_key": 1}),
        ("factor", {"rope_scaling": {"type": "yarn", "factor": 0}}),
        ("factor", {"rope_scaling": {"type": "yarn"}}),
        ("original_max_position_embeddings", {"rope_scaling": {**YARN, ORIGINAL: 1}}),
        ("original_max_position_embeddings", {"rope_scaling": YARN, ORIGINAL: 16}),
        ("beta_slow", {"rope_scaling": {**YARN, "beta_slow": 40}}),
        ("theta", {"rope_scaling": YARN, "rope_theta": 1.0}),
        ("truncate", {"rope_scaling": {**YARN, "truncate": "no"}}),
        ("rope attention", {"rope_scaling": {**YARN, "attention_factor": -1.0}}),
        ("short_mscale", {"rope_scaling": {**YARN, "long_factor": [1.0], "short_factor": [1.0], "short_mscale": 1.0}}),
        ("dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}}),
        ("long_factor", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}),
        ("long_factor", {"rope_parameters": {**LONG, "long_factor": [1.0, "x"]}}),
        ("RoPE factors must be 8", {"rope_parameters": {**LONG, "long_factor": [1.0] * 7 + [0.0]}}),
        ("low_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}),
        ("beta_fast", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}),
        ("rope_type", {"rope_scaling": {"factor": 2.0}}),
        ("rope_theta", {"rope_theta": float("nan")}),
        ("rope_theta", {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
        ("rms_norm_eps", {"rms_norm_eps": 10**400}),
        ("heads", {"num_key_value_heads": 3}),
        ("head size 100 .*load 8 elements", {"head_dim": 100}),
        ("hidden_size", {"hidden_size": 66}),
        ("hidden is -64", {**GEMMA, "hidden_size": -64}),
        ("num_attention_heads", {"num_attention_heads": 0}),
        ("layers", {"num_hidden_layers": 10**8}),
        ("vocab", {"vocab_size": 2 * 10**9}),
        ("vocab_size", {"vocab_size": None}),
        ("vocab is 0; it must be between 1 and 16777216", {"vocab_size": 0}),
        ("intermediate_size", {"intermediate_size": 1.5}),
        ("mlp_bias", {"mlp_bias": "yes"}),
        ("bos_token_id", {"bos_token_id": "one"}),
    ],
)
def test_refused_by_name(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MegakernelError, match=f"^config.json.*{named}"):
        parse(**changes)


def test_a_family_that_does_not_run_says_what_it_needs(tmp_path: Path) -> None:
    for name, what in LACKING.items():
        with pytest.raises(MegakernelError) as caught:
            parse(model_type=name, architectures=["AnyForCausalLM"])
        assert str(caught.value) == f"config.json: {name} models are not supported: they need {what}"
    tiny_gguf(tmp_path / "m.gguf", "grok")
    with pytest.raises(MegakernelError, match=r"m\.gguf: grok models are not supported: they need experts of another"):
        load_config(str(tmp_path / "m.gguf"))


def test_every_name_is_loaded_or_explained_but_no_family_that_runs_lacks_anything() -> None:
    # The class of Gemma 3 that sees images, one that no published file names, and the example of adding-a-model.md.
    others = {"gemma3", "beam", "helium"}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= others | set(FAMILIES) | set(LACKING)
    names = {name for family in FAMILIES.values() for name in (family.name, *family.gguf)}
    assert not names & set(LACKING)


def test_yarn_lengthens_the_context_as_in_vllm() -> None:
    assert parse(rope_scaling=YARN).max_context == 512
    assert parse(rope_scaling=YARN, max_position_embeddings=128).max_context == 512
    tuned = {**YARN, ORIGINAL: None, "finetuned": True}
    assert [parse(rope_scaling=tuned, **{ORIGINAL: size}).max_context for size in (None, 256)] == [2048, 1024]


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 70_000]}))
    assert read_hf_config(tmp_path).eos_ids == (5, 9)


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True, "bos_token_id": 1}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 1, "top_k": 9, "do_sample": False, "max_new_tokens": 7}, {"temperature": 0, "max_tokens": 7}),
        (
            {"top_k": 20, "min_p": 0, "repetition_penalty": 1, "max_new_tokens": 99},
            {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 99},
        ),
        ({"temperature": None}, {}),
        ({"top_k": 2.5}, "top_k is 2.5, not a whole number"),
        ({"temperature": "hot"}, 'temperature is "hot", not a finite number'),
    ],
)
def test_defaults_of_sampling(tmp_path: Path, content: dict[str, Any], read: dict[str, float] | str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    if isinstance(read, dict):
        assert read_sampling(tmp_path) == read
    else:
        with pytest.raises(MegakernelError, match=rf"generation_config\.json: {read}"):
            read_sampling(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ', "\x00"])
def test_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MegakernelError, match=r"config\.json"):
        read_hf_config(tmp_path)


def own_factors(head_dim: int) -> dict[str, list[float]]:
    pairs = range(1, head_dim // 2 + 1)
    return {"short_factor": [1 + i / 100 for i in pairs], "long_factor": [1.0 + i * i / 7 for i in pairs]}


@pytest.mark.parametrize("head_dim", [8, 72])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, "factor": 32.0},
        {**LLAMA3, ORIGINAL: 128},
        {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768},
        {"rope_type": "yarn", "factor": 16.0, ORIGINAL: 512, "beta_fast": 64.0, "beta_slow": 0.5, "truncate": False},
        {"rope_type": "yarn", "factor": 1.0},
        {"rope_type": "yarn", "factor": 40.0, ORIGINAL: 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 16, "attention_factor": 0.8},
        {"rope_type": "longrope", ORIGINAL: 4096},
        {"rope_type": "longrope", ORIGINAL: 4096, "factor": 3.0},
        {"rope_type": "longrope", ORIGINAL: 65536, "attention_factor": 1.3},
    ],
)
def test_frequencies_and_factor_are_those_of_transformers(head_dim: int, scaling: dict[str, Any]) -> None:
    parameters = {**scaling, "rope_theta": 500000.0}
    if scaling["rope_type"] == "longrope":
        parameters |= own_factors(head_dim)
    raw = {**BASE, "head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": parameters}
    config = parse_hf_config(raw, "")
    hf = HfConfig(**{**raw, "rope_parameters": dict(parameters)})
    contexts = (131072, scaling.get(ORIGINAL, 8192)) if scaling["rope_type"] == "longrope" else (131072,)
    for context in contexts:
        if scaling["rope_type"] == "default":
            theirs, factor = LlamaRotaryEmbedding(hf).inv_freq, 1.0
        else:
            theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf, seq_len=context)
        ours, attention = rope_table(replace(config, max_context=context))
        assert attention.dtype == np.float32 and (attention == np.float32(factor)).all()
        # torch does not round powers correctly, so a few frequencies differ by one unit in the last place.
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2.0**-22, atol=0)
        assert (ours == theirs.numpy()).mean() >= 0.75
