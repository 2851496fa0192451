"""Mistral and Ministral: Llama's forward pass, with sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward
from .windows import read_gguf_window, windows


def _read_given(config: Keys) -> dict[str, Any]:
    """Read the sliding window, which only a config.json with the key `sliding_window` has."""
    return windows(config) if "sliding_window" in config.raw else {}


# GGUF files of the architecture "llama" may also contain Mistral models, because the forward pass is the same.
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    ("llama", "mistral3"),
    forward,
    WEIGHTS,
    windows,
    frozenset({"sliding_window"}),
    defaults={"max_position_embeddings": 131072},
    read_gguf=read_gguf_window,
)

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    keys=MISTRAL.keys | {"layer_types"},
)

MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    read=_read_given,
    defaults={"max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
)
