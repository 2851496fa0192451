"""Qwen2 and Qwen2.5: Llama's forward pass with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward


def read(config: Keys) -> dict[str, Any]:
    """Accept the sliding-window keys only if no layer uses a sliding window."""
    config.only("use_sliding_window", False)
    config.only("layer_types", ["full_attention"] * config.count("num_hidden_layers"))
    return {"qkv_bias": True}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ("qwen2",),
    forward,
    WEIGHTS,
    read,
    frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}),
    interleaved=False,
)
