"""Phi-3, Phi-4 and Phi-4-mini: Llama's forward pass, with q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from typing import Any

from ...isa import Buffer
from ..config import Keys
from . import llama
from .family import Family, Weight
from .windows import read_gguf_window, windows

WEIGHTS = llama.WEIGHTS | {
    Buffer.W_QKV: Weight(("model.layers.{}.self_attn.qkv_proj.weight",) * 3, ("blk.{}.attn_qkv.weight",) * 3, 2),
    Buffer.W_GATE_UP: Weight(("model.layers.{}.mlp.gate_up_proj.weight",) * 2, ("blk.{}.ffn_up.weight",) * 2),
}


def read(config: Keys) -> dict[str, Any]:
    """Read the sliding window. Other programs take the RoPE kind "yarn" of this family for "longrope"."""
    for key in ("full_attn_mod", "interpolate_factor"):  # in the files of Phi-4-mini; no program reads them
        config.only(key, 1)
    scaling = Keys(config.get("rope_parameters") or config.get("rope_scaling") or {}, config.source)
    for spelling in ("rope_type", "type"):
        scaling.only(spelling, "default", "longrope", "su")
    return windows(config) if config.get("sliding_window") else {}


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    ("phi3",),
    llama.forward,
    WEIGHTS,
    read,
    frozenset({"full_attn_mod", "interpolate_factor", "sliding_window"}),
    interleaved=False,
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    | {"partial_rotary_factor": 1.0},
    read_gguf=read_gguf_window,
)
