"""ERNIE 4.5 without experts: Llama's forward pass, with the rows of RoPE pairs side by side in all files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import Keys
from .family import Family
from .llama import WEIGHTS, forward


def read(config: Keys) -> dict[str, Any]:
    """All projections have biases, or none has."""
    return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), config.flag("use_bias"))


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    ("ernie4_5",),
    forward,
    {buffer: replace(weight, rotated=0) for buffer, weight in WEIGHTS.items()},
    read,
    frozenset({"use_bias"}),
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
)
