"""Qwen2 and Qwen2.5: Llama's forward pass with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from ...isa.record import MOST_LAYERS
from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward
from .windows import windows


def read(config: Keys) -> dict[str, Any]:
    """Read the sliding window, which only the layers from `max_window_layers` on use, and only if it is turned on."""
    layers, first = config.count("num_hidden_layers"), config.count("max_window_layers", 28)
    if not config.flag("use_sliding_window"):
        config.only("layer_types", ["full_attention"] * min(layers, MOST_LAYERS))
        return {"qkv_bias": True}
    return {"qkv_bias": True} | windows(config, range(min(first, layers, MOST_LAYERS)))


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ("qwen2",),
    forward,
    WEIGHTS,
    read,
    frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}),
    interleaved=False,
    defaults={"max_position_embeddings": 32768},
)
