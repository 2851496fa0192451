"""Compares logits with transformers on random checkpoints. Every planted bug gives an error far above the tolerance.

The error is max |difference| / standard deviation of the reference's logits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runner import Runner
from tiny_llama import ROPES, error, hf_logits, make_llama, rounded

from megakernel.isa import Dtype
from megakernel.model import Rope, RopeKind

TOLERANCE = 1e-4
LENGTH, CUTS = 150, [60, 147, 148, 149]

MULTIPLIERS = {
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8,
}
PHI4_MINI = Rope(
    10000.0, RopeKind.LONGROPE, 8.0, original_context=64, factors=(4.0, 9.0, 2.0) * 3, short_factors=(1.0,) * 9, dims=18
)

SHAPES = {
    "mha": {"heads": 4, "kv_heads": 4, "head_dim": 16},
    "gqa 9:3": {"hidden": 72, "heads": 9, "kv_heads": 3, "head_dim": 8},
    "mqa": {"heads": 8, "kv_heads": 1, "head_dim": 24},
    "head 128": {"heads": 2, "kv_heads": 1, "head_dim": 128},
    "head 40": {"heads": 3, "kv_heads": 3, "head_dim": 40, "vocab": 97},
    "odd ffn": {"ffn": 173, "vocab": 331},
    "tied": {"tied": True, "vocab": 257},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True, "ffn": 75},
    "linear rope": {"rope": ROPES["linear"]},
    "llama3 rope": {"rope": ROPES["llama3"]},
    "yarn rope": {"rope": ROPES["yarn"]},
    "longrope": {"rope": ROPES["longrope"]},
    "one layer": {"layers": 1, "rms_eps": 1e-2},
    "mistral": {"family": "mistral", "sliding_window": None, "heads": 5, "kv_heads": 5, "hidden": 56, "ffn": 61},
    "qwen2": {"family": "qwen2", "heads": 7, "kv_heads": 1, "head_dim": 24, "hidden": 40, "ffn": 91, "vocab": 203},
    "qwen3": {"family": "qwen3", "heads": 6, "kv_heads": 3, "head_dim": 40, "hidden": 56, "ffn": 83, "tied": True},
    "glm": {"family": "glm", "heads": 6, "kv_heads": 2, "head_dim": 40, "hidden": 56, "ffn": 77},
    "granite": {"family": "granite", "kv_heads": 3, "hidden": 40, "tied": True, "rms_eps": 0.5, **MULTIPLIERS},
    "phi3": {"family": "phi3", "heads": 4, "head_dim": 24, "hidden": 96, "rope": PHI4_MINI},
    "smollm3": {"family": "smollm3", "layers": 3, "heads": 4, "hidden": 40, "no_rope_layers": [1, 0, 1], "tied": True},
}


def computed(checkpoint, dtype=Dtype.F32, backend="cpu"):
    """Return the token ids of a prompt, and the logits that a backend computes for it."""
    tokens = np.random.default_rng(5).integers(0, checkpoint.config.vocab, LENGTH).tolist()
    runner = Runner(checkpoint, backend, dtype)
    got = runner.logits(tokens, CUTS)
    runner.close()
    return tokens, got


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", SHAPES)
def test_f32(name, backend):
    model, checkpoint = make_llama(seed=1, **SHAPES[name])
    tokens, got = computed(checkpoint, backend=backend)
    assert error(got, hf_logits(model, tokens)) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "mha",
        "gqa 9:3",
        "tied",
        "attention bias",
        "llama3 rope",
        "yarn rope",
        "mistral",
        "qwen2",
        "qwen3",
        "granite",
        "phi3",
    ],
)
def test_bf16(name):
    """The error against float32 is at most 1.5 times that of transformers in bfloat16."""
    model, checkpoint = make_llama(seed=2, **SHAPES[name])
    tokens, got = computed(rounded(model, checkpoint), Dtype.BF16)
    truth = hf_logits(model, tokens)
    assert error(got, truth) <= 1.5 * error(hf_logits(model.to(torch.bfloat16), tokens), truth)


@pytest.fixture(scope="module")
def good():
    """A model, a prompt, and the logits that the CPU backend computes for it."""
    model, checkpoint = make_llama(seed=1, heads=4, kv_heads=2, head_dim=16)
    return model, *computed(checkpoint)


POSITIONS = torch.arange(LENGTH)[None]
PLANTED = {
    "rope off by one": {"position_ids": POSITIONS + (POSITIONS == LENGTH - 1)},
    "dropped KV row": {"position_ids": POSITIONS, "attention_mask": (POSITIONS != LENGTH // 2).float()},
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(good, bug):
    model, tokens, got = good
    first = LENGTH // 2 + 1  # the first row after the KV row that is dropped
    assert error(got[first:], hf_logits(model, tokens, **PLANTED[bug])[first:]) > 100 * TOLERANCE


def test_planted_swapped_heads(good):
    model, tokens, got = good
    heads = model.model.layers[0].self_attn.q_proj.weight.data.view(4, 16, -1)
    heads[[0, 1]] = heads[[1, 0]]
    swapped = hf_logits(model, tokens)
    heads[[0, 1]] = heads[[1, 0]]
    assert error(got, swapped) > 100 * TOLERANCE
