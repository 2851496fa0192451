"""Mistral and Ministral, whose forward pass is Llama's in contexts that are not longer than a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward


def read(config: Keys) -> dict[str, Any]:
    """Read the sliding window. A config.json without the key `sliding_window` means a window of 4,096 tokens."""
    if config.raw.get("sliding_window", 4096) is None:
        return {}
    return {"window": config.count("sliding_window", 4096)}


def _read_given(config: Keys) -> dict[str, Any]:
    """Read the sliding window, which only a config.json with the key `sliding_window` has."""
    return read(config) if "sliding_window" in config.raw else {}


def _read_types(config: Keys) -> dict[str, Any]:
    """Read the sliding window, unless `layer_types` says that no layer has it."""
    types = config.names("layer_types", "full_attention", "sliding_attention")
    return read(config) if not types or "sliding_attention" in types else {}


# GGUF files of the architecture "llama" may also contain Mistral models, because the forward pass is the same.
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    ("llama", "mistral3"),
    forward,
    WEIGHTS,
    read,
    frozenset({"sliding_window"}),
    defaults={"max_position_embeddings": 131072},
)

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    read=_read_types,
    keys=MISTRAL.keys | {"layer_types"},
)

MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    read=_read_given,
    defaults={"max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
)
