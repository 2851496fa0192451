"""GLM-4 without norms of what a layer adds: Llama's forward pass. RoPE rotates the first half of each head, whose pairs
are side by side in all files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer
from ..config import Keys
from . import llama, phi3
from .family import Family


def read(config: Keys) -> dict[str, Any]:
    """Read whether q, k and v have biases. The output projection has none."""
    return {"qkv_bias": config.flag("attention_bias", True)}


GLM = Family(
    "glm",
    "GlmForCausalLM",
    (),
    llama.forward,
    {buffer: replace(weight, rotated=0) for buffer, weight in llama.WEIGHTS.items()}
    | {Buffer.W_GATE_UP: phi3.WEIGHTS[Buffer.W_GATE_UP]},
    read,
    frozenset({"attention_bias"}),
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "head_dim": 128,
    },
)
