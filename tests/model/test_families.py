"""Tests of every model family: its safetensors and GGUF files load the same weights, and any number of ranks computes
the same results as transformers. An error is max |difference| / standard deviation of the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_helpers import write_gguf
from runner import Piece, Runner
from safetensors.torch import save_file
from tiny_llama import ROPES, error, hf_logits, make_llama, rounded
from transformers import (
    Gemma3Config,
    Mistral3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from weights import loaded

from megakernel.cli.options import load
from megakernel.isa import Buffer, Dtype
from megakernel.model import Checkpoint, ModelConfig, Rope, RopeKind, open_checkpoint
from megakernel.model.families import FAMILIES, weights

TOLERANCE = 1e-4
# Numbers that float32 represents exactly, because GGUF files store them as float32.
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.21875, "attention_multiplier": 0.078125}
MULTIPLIERS |= {"logits_scaling": 8.0}
PHI4_MINI = replace(ROPES["longrope"], factors=(4.0, 9.0, 2.0) * 3, short_factors=(1.0,) * 9, dims=18)
SHAPES: dict[str, dict[str, Any]] = {
    "cwm": {"layers": 5, "heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 72, "ffn": 77, "sliding_window": 9}
    | {"rope": ROPES["llama3"]},
    "dots1": {"layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 37, "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5},
    "ernie4_5_moe": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 40, "ffn": 37, "tied": True},
    "ernie4_5": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 40, "ffn": 67, "use_bias": True, "tied": True},
    "exaone": {"heads": 6, "kv_heads": 2, "hidden": 72, "head_dim": 24, "ffn": 77},
    "exaone4": {"layers": 5, "heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 69, "sliding_window": 9},
    "gemma": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 69, "tied": True},
    "gemma2": {"layers": 5, "heads": 6, "kv_heads": 3, "head_dim": 24, "hidden": 48, "ffn": 75, "tied": True}
    | {"sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.5, "final_logit_softcapping": 9.0},
    "gemma3_text": {"layers": 7, "heads": 6, "kv_heads": 3, "head_dim": 24, "hidden": 48, "ffn": 75, "tied": True}
    | {"sliding_window": 9, "query_pre_attn_scalar": 24},
    "glm": {"heads": 6, "kv_heads": 2, "head_dim": 40, "hidden": 56, "ffn": 77},
    "glm4": {"heads": 6, "kv_heads": 2, "head_dim": 40, "hidden": 56, "ffn": 77},
    "glm4_moe": {"layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 40, "hidden": 56, "ffn": 51, "use_qk_norm": True}
    | {"attention_bias": True, "routed_scaling_factor": 2.5},
    "gpt_oss": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 77, "sliding_window": 9}
    | {"rope": Rope(150000.0, RopeKind.YARN, 32.0, 1.0, 32.0, original_context=64, truncate=False)},
    "granite": {"heads": 6, "kv_heads": 3, "head_dim": 16, "hidden": 40, "ffn": 99, "tied": True, **MULTIPLIERS},
    "granitemoe": {"heads": 6, "kv_heads": 2, "head_dim": 8, "hidden": 48, "ffn": 77, "tied": True, **MULTIPLIERS},
    "granitemoehybrid": {"heads": 6, "kv_heads": 2, "head_dim": 8, "hidden": 48, "tied": True, **MULTIPLIERS},
    "hunyuan_v1_dense": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 69, "attention_bias": True},
    "internlm3": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 42, "ffn": 67, "qkv_bias": True, "bias": True},
    "iquestcoder": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 42, "ffn": 71},
    "llama": {"heads": 9, "kv_heads": 3, "head_dim": 8, "hidden": 72, "ffn": 137, "tied": True},
    "mistral": {"sliding_window": None, "heads": 5, "kv_heads": 5, "head_dim": 16, "hidden": 56, "ffn": 61},
    "mixtral": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 40, "ffn": 77, "rope": Rope(1e6)},
    "ministral": {"sliding_window": 64, "heads": 4, "kv_heads": 2, "head_dim": 24, "hidden": 72, "ffn": 45},
    "ministral3": {"heads": 6, "kv_heads": 3, "head_dim": 40, "hidden": 40, "ffn": 133, "vocab": 117}
    | {"rope": Rope(1e4, RopeKind.YARN, 8.0, 1.0, 32.0, original_context=128, ends=True)},
    "olmo2": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 77},
    "olmoe": {"heads": 6, "kv_heads": 3, "head_dim": 8, "hidden": 48, "ffn": 79},
    "olmo3": {"layers": 5, "heads": 4, "kv_heads": 4, "head_dim": 16, "hidden": 40, "ffn": 67, "sliding_window": 9}
    | {"rope": Rope(5e5, RopeKind.YARN, 8.0, 1.0, 32.0, original_context=64)},  # in the fourth layer
    "phi3": {"heads": 5, "kv_heads": 5, "head_dim": 24, "hidden": 72, "ffn": 69, "sliding_window": 17}
    | {"rope": Rope(dims=18)},
    "qwen2": {"heads": 7, "kv_heads": 1, "head_dim": 24, "hidden": 40, "ffn": 91, "vocab": 203},
    "qwen2_moe": {"heads": 6, "kv_heads": 3, "head_dim": 8, "hidden": 48, "ffn": 37},
    "qwen3": {"heads": 6, "kv_heads": 3, "head_dim": 40, "hidden": 56, "ffn": 83, "attention_bias": True},
    "qwen3_moe": {"heads": 6, "kv_heads": 3, "head_dim": 40, "hidden": 56, "ffn": 83, "attention_bias": True},
    "vaultgemma": {"layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 24, "hidden": 48, "ffn": 75, "tied": True}
    | {"sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.5, "final_logit_softcapping": 9.0},
    "seed_oss": {"heads": 10, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 85, "vocab": 131},
    "smollm3": {"layers": 4, "heads": 4, "kv_heads": 2, "hidden": 48, "ffn": 121},  # the fourth layer has no RoPE
}
# The architectures in whose GGUF files llama.cpp's converter stores the two rows of a RoPE pair next to each other. It
# writes models with windows in all layers as mistral3, not as llama.
PERMUTED = ("granite", "granitemoe", "llama", "mistral3", "smollm3")
GGUF = [(family.name, name, name in PERMUTED) for family in FAMILIES.values() for name in family.gguf]
GGUF = [case for case in GGUF if case[:2] not in (("ministral", "llama"), ("ministral3", "llama"))]
# More shapes of families whose attention differs from Llama's, and of Llama itself. LongRoPE and YaRN change the
# frequencies of texts of more than 64 tokens.
MORE: dict[str, list[dict[str, Any]]] = {
    "cwm": [{"layers": 3, "sliding_window": 30, "kv_heads": 6}, {"heads": 9, "kv_heads": 3, "ffn": 99}],
    "dots1": [{"first_k_dense_replace": 0, "kv_heads": 6}, {"first_k_dense_replace": 2, "norm_topk_prob": False}],
    "ernie4_5_moe": [{"moe_layer_start_index": 0, "vocab": 131}, {"layers": 3, "moe_num_shared_experts": 3, "ffn": 29}],
    "gemma2": [
        {"layers": 4, "sliding_window": 30, "kv_heads": 6, "attn_logit_softcapping": None},
        {"heads": 5, "kv_heads": 1, "hidden": 80, "vocab": 131, "final_logit_softcapping": 12.0},
    ],
    "glm4_moe": [
        {"use_qk_norm": False, "norm_topk_prob": False, "n_shared_experts": 3},
        {"first_k_dense_replace": 2, "kv_heads": 1, "attention_bias": False, "tied": True},
    ],
    "hunyuan_v1_dense": [
        {"heads": 5, "kv_heads": 5, "hidden": 72, "attention_bias": False, "tied": True},
        {"kv_heads": 1, "head_dim": 40, "ffn": 99},
    ],
    "qwen2_moe": [
        {"norm_topk_prob": True, "shared_expert_intermediate_size": 37},
        {"heads": 4, "kv_heads": 1, "head_dim": 24, "hidden": 96, "qkv_bias": False, "tied": True},
    ],
    "granitemoe": [
        {"heads": 3, "kv_heads": 3, "head_dim": 16, "num_local_experts": 1, "num_experts_per_tok": 1},
        {"ffn": 35, "tied": False},
    ],
    "exaone4": [
        {"sliding_window": None, "layer_types": ["full_attention"] * 5, "tied": True},
        {"layers": 4, "hidden": 96, "kv_heads": 6},
    ],
    "gpt_oss": [
        {"layers": 3, "num_local_experts": 9, "num_experts_per_tok": 4, "sliding_window": 17},
        {"heads": 7, "kv_heads": 1, "hidden": 72, "ffn": 35, "num_experts_per_tok": 1, "attention_bias": False},
    ],
    "granite": [{"rms_eps": 0.5}],
    "llama": [
        {"heads": 4, "kv_heads": 4, "head_dim": 16, "rope": ROPES["linear"]},
        {"heads": 8, "kv_heads": 1, "head_dim": 24, "attention_bias": True, "rope": ROPES["llama3"]},
        {"heads": 2, "kv_heads": 1, "head_dim": 128, "mlp_bias": True, "rope": ROPES["yarn"]},
        {"heads": 3, "kv_heads": 3, "head_dim": 40, "vocab": 97, "layers": 1, "rms_eps": 1e-2, "tied": False},
        {"heads": 6, "kv_heads": 2, "head_dim": 16, "rope": ROPES["longrope"]},
    ],
    "olmo2": [{"kv_heads": 6, "head_dim": 40}, {"heads": 5, "kv_heads": 1, "hidden": 72, "attention_bias": True}],
    "olmo3": [
        {"layers": 4, "sliding_window": 30, "kv_heads": 2},
        {"heads": 9, "kv_heads": 3, "head_dim": 8, "ffn": 99},
    ],
    "phi3": [{"heads": 4, "kv_heads": 2, "hidden": 96, "rope": PHI4_MINI}],
    "qwen3": [{"hidden": 264}, {"heads": 3, "kv_heads": 1, "head_dim": 128}],  # q has fewer or more columns than X
    "qwen3_moe": [{"norm_topk_prob": False}],
    "smollm3": [{"layers": 3, "hidden": 40, "no_rope_layers": [1, 0, 1], "tied": True}],
}
MORE |= {
    family: [{"kv_heads": 6, "vocab": 131, "rope": ROPES["llama3"]}, {"kv_heads": 1, "tied": True}]
    for family in ("exaone", "granitemoehybrid", "internlm3", "iquestcoder", "olmoe")
}
for name, shape in SHAPES.items():  # three shapes for each family
    more = [{"kv_heads": shape["heads"], "vocab": 131}, {"kv_heads": 1, "ffn": 93}]
    MORE[name] = MORE.get(name, []) + more[len(MORE.get(name, [])) :]
# (backend, number of ranks). A family's other shapes than its first do not run in the first way.
WAYS = [("cpu", 8), ("cpu", 1), ("reference", 2), ("cpu", 4)]
CASES = [(family, {}, *way) for family in SHAPES for way in WAYS]
CASES += [(family, more, *way) for family, shapes in MORE.items() for more in shapes for way in WAYS[1:]]
TOKENS = np.random.default_rng(8).integers(0, 97, 75).tolist()
EDGES = (0, 60, 74, 75)  # the steps in which they are computed: two chunks of a prompt, and a decode row


def held(config: ModelConfig) -> list[tuple[Buffer, int]]:
    """Return every weight buffer that is read from files, once for layer 0 and once for layer 1."""
    buffers = [b for b in weights(config) if b is not Buffer.INV_FREQ]
    return [(buffer, layer) for buffer in buffers for layer in (0, 1)]


def test_three_shapes_of_every_family_are_tested() -> None:
    assert set(SHAPES) == set(FAMILIES) and min(map(len, MORE.values())) >= 2


# Shapes that GGUF files do not express, because llama.cpp assumes other values, or whose RoPE scaling this test does
# not write.
ABSENT = [("exaone", 1), ("gemma2", 1), ("llama", 1), ("llama", 2), ("olmoe", 1), ("phi3", 1), ("qwen2_moe", 1)]
ABSENT += [("qwen3_moe", 1), ("smollm3", 1)]


@pytest.mark.parametrize(
    ("family", "architecture", "permuted", "number"),
    [(*case, n) for case in GGUF for n in range(3) if (case[0], n) not in ABSENT],
)
def test_files_hold_the_same_model(tmp_path: Path, family: str, architecture: str, permuted: bool, number: int) -> None:
    # GGUF stores rms_eps as float32. A power of two stays exact.
    shape = SHAPES[family] | ({}, *MORE[family])[number] | {"rms_eps": 2.0**-17}
    model, checkpoint = make_llama(1, family, **shape)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "m.gguf", model, architecture, permuted=permuted)
    for stored in (open_checkpoint(str(tmp_path)), open_checkpoint(str(tmp_path / "m.gguf"))):
        assert replace(stored.config, family=family) == checkpoint.config
        for buffer, layer in held(checkpoint.config):
            want = loaded(checkpoint, buffer, layer)
            np.testing.assert_array_equal(loaded(stored, buffer, layer), want, err_msg=buffer.name)


def run(checkpoint: Checkpoint, tp: int, dtype: Dtype = Dtype.F32, backend: str = "reference", **options: Any):
    """Return the tokens, log-probabilities and logits that a backend computes for TOKENS."""
    runner, found = Runner(checkpoint, backend, dtype, tp=tp, **options), []
    for start, end in pairwise(EDGES):
        out = runner.step([Piece(3, start, TOKENS[start:end])])
        found.append([getattr(out, name)[: end - start].copy() for name in ("tokens", "logprobs", "logits")])
    runner.close()
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(("family", "more", "backend", "tp"), CASES)
def test_tokens_and_logprobs_as_in_transformers(family: str, more: dict[str, Any], backend: str, tp: int) -> None:
    model, checkpoint = make_llama(3, family, **SHAPES[family] | more)
    tokens, logprobs, logits = run(checkpoint, tp, backend=backend)
    want = hf_logits(model, TOKENS)
    assert error(logits, want) < TOLERANCE
    assert (tokens == want.argmax(axis=1)).all()
    np.testing.assert_allclose(logprobs, torch.log_softmax(torch.from_numpy(want), -1).max(-1).values, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("granitemoe", "num_local_experts"),
        ("mixtral", "num_local_experts"),
        ("qwen3_moe", "num_experts"),
        ("glm4_moe", "n_routed_experts"),
        ("gpt_oss", "num_local_experts"),
    ],
)
def test_whole_experts_on_each_rank_compute_the_same(family: str, number: str) -> None:
    model, checkpoint = make_llama(5, family, **SHAPES[family] | {number: 8 - (family == "glm4_moe")})  # and one shared
    logits = run(checkpoint, 4, backend="cpu", expert_parallel=True)[2]
    assert error(logits, hf_logits(model, TOKENS)) < TOLERANCE


# Texts of several KV blocks, for Llama and for families with sliding windows in all layers or in some of
# them. The windows begin at any place in a KV block.
LONG: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 90},
    "gpt_oss": {"sliding_window": 90},
    "llama": {},
    "mistral": {"sliding_window": 100},
    "ministral": {
        "layers": 3,
        "sliding_window": 20,
        "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full")],
    },
    "olmo3": {"sliding_window": 90},
    "phi3": {"sliding_window": 1},
    "qwen2": {"layers": 3, "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1},
}


@pytest.mark.parametrize(("backend", "tp"), [("reference", 1), ("cpu", 4)])
@pytest.mark.parametrize("family", LONG)
def test_long_texts_have_the_logits_of_transformers(family: str, backend: str, tp: int) -> None:
    model, checkpoint = make_llama(5, family, **SHAPES[family] | LONG[family])
    tokens = np.random.default_rng(9).integers(0, checkpoint.config.vocab, 300).tolist()
    runner = Runner(checkpoint, backend, tp=tp, max_context=320)
    logits = runner.logits(tokens, [250, 251])
    assert error(logits, hf_logits(model, tokens)) < TOLERANCE
    runner.close()


SPLITS = [(1, "auto"), (8, "sharded"), (8, "replicated")]
# Families with the same phases as Llama are as exact as Llama on the reference backend and with any number of ranks.
OTHERS = ("glm4", "gpt_oss", "llama", "olmo2", "qwen3")
ROUNDED = [(family, "cpu", 1, "auto") for family in SHAPES]
ROUNDED += [(family, "reference", *split) for family in OTHERS for split in SPLITS]


@pytest.mark.parametrize(("family", "backend", "tp", "o"), ROUNDED)
def test_bf16_is_as_good_as_transformers_in_bf16(family: str, backend: str, tp: int, o: str) -> None:
    model, _ = make_llama(4, family, **SHAPES[family])
    checkpoint = rounded(model)
    want = hf_logits(model, TOKENS)
    theirs = hf_logits(model.to(torch.bfloat16), TOKENS)
    assert 0 < error(run(checkpoint, tp, Dtype.BF16, backend, o=o)[2], want) <= 1.5 * error(theirs, want)


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 16}


def seeing(inner: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model that also sees images, with the language model `inner`."""
    shared = {"tie_word_embeddings": inner.tie_word_embeddings}
    if inner.model_type == "mistral":
        return Mistral3Config(text_config=inner, vision_config=PixtralVisionConfig(**VISION), **shared)
    if inner.model_type == "gemma3_text":
        vision: Any = SiglipVisionConfig(**VISION)
        return Gemma3Config(text_config=inner, vision_config=vision, mm_tokens_per_image=4, **shared)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": inner.hidden_size}
    own = {name: value for name, value in inner.to_dict().items() if name not in ("model_type", "architectures")}
    if inner.model_type == "qwen2":
        own["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
        return Qwen2_5_VLConfig(text_config=own, vision_config=vision, **shared)
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 4}
    own["rope_parameters"] |= {"mrope_section": [8, 6, 6], "mrope_interleaved": True}
    kind = Qwen3VLConfig if inner.model_type == "qwen3" else Qwen3VLMoeConfig
    return kind(text_config=own, vision_config=vision, **shared)


PREFIXES = [("language_model.", ""), ("model.language_model.", "model."), ("model.", "model.")]


@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {}),
        ("gemma3_text", {}),
        ("gemma3_text", {"layers": 3, "sliding_window": 30, "heads": 4, "kv_heads": 1}),
        ("gemma3_text", {"hidden": 96, "kv_heads": 6, "vocab": 131}),
        ("qwen2", {"heads": 5, "head_dim": 8}),
        ("qwen2", {"heads": 5, "head_dim": 8, "kv_heads": 5, "tied": True}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"kv_heads": 1, "tied": True, "norm_topk_prob": False}),
        ("qwen3", {}),
        ("qwen3", {"kv_heads": 1, "attention_bias": False, "tied": True}),
        ("qwen3", {"layers": 3, "heads": 4, "kv_heads": 4, "vocab": 131}),
    ],
)
def test_text_part_of_a_model_that_sees_images(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str, changes: dict[str, Any], prefixes: tuple[str, str]
) -> None:
    text, checkpoint = make_llama(2, family, **SHAPES[family] | changes)
    config = seeing(text.config)
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(tmp_path)
    outer, inside = prefixes
    names = {
        outer + name.removeprefix(inside): value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in text.state_dict().items()
        if name != "lm_head.weight"
    }
    if not text.config.tie_word_embeddings:
        names[("" if inside else outer) + "lm_head.weight"] = text.lm_head.weight.data
    images = {"vision_tower.x": torch.ones(3), "model.visual.x": torch.ones(3)}
    save_file(names | images, tmp_path / "model.safetensors")
    stored = open_checkpoint(str(tmp_path))
    # The experts of a model that sees images always have weights that add up to 1.
    assert stored.config == replace(checkpoint.config, normalised_routes=family == "qwen3_moe")
    for buffer, layer in held(checkpoint.config):
        np.testing.assert_array_equal(loaded(stored, buffer, layer), loaded(checkpoint, buffer, layer))
    load(str(tmp_path), {"backend": "null"})
    assert "sees images: the 2 tensors of its image encoder are not loaded" in " ".join(capsys.readouterr().err.split())
