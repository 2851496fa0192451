"""Granite 3: Llama's forward pass with four multipliers, which `ModelConfig` folds into numbers that Llama has too."""

from __future__ import annotations

from typing import Any

from ..config import Keys
from .family import Family
from .llama import WEIGHTS, biases, forward

# The names of the multipliers in config.json and in GGUF files.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def read(config: Keys) -> dict[str, Any]:
    """Read the multipliers, each of which is 1 if absent, and which matmuls have biases."""
    return biases(config) | {name: config.number(name, 1.0) for name in _MULTIPLIERS}


def read_gguf(config: Keys) -> dict[str, Any]:
    """Read the multipliers, of which 0 means the default, as an absent one does."""
    return {name: config.number(key, 0.0) for name, key in _MULTIPLIERS.items() if config.get(key)}


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    ("granite",),
    forward,
    WEIGHTS,
    read,
    frozenset({"attention_bias", "mlp_bias", *_MULTIPLIERS}),
    read_gguf=read_gguf,
    gguf_keys=frozenset(_MULTIPLIERS.values()),
)
