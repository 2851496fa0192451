"""Mistral without sliding-window attention: Llama's forward pass."""

from __future__ import annotations

from typing import Any

from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward


def read(config: Keys) -> dict[str, Any]:
    """Read the sliding window. A config.json without the key `sliding_window` means a window of 4,096 tokens."""
    if config.raw.get("sliding_window", 4096) is None:
        return {}
    return {"window": config.count("sliding_window", 4096)}


# GGUF files of the architecture "llama" may also contain Mistral models, because the forward pass is the same.
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    ("mistral3",),
    forward,
    WEIGHTS,
    read,
    frozenset({"sliding_window"}),
    context=131072,
)
