"""SmolLM3: Llama's forward pass. In layers without RoPE, the pairs of q and k turn by an angle of 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import MegakernelError
from ...isa import Forward
from ...isa.record import MOST_LAYERS
from ..config import Keys, ModelConfig
from . import llama
from .family import Family
from .windows import every_nth


def forward(c: ModelConfig) -> Forward:
    """Llama's phases. The prologue computes layer 0's table of cosines and sines, and each layer that of the next."""
    f = llama.forward(c)
    _, rope = f.prologue
    return Forward.of(f.prologue, [*f.body, replace(rope, name="next_rope", ahead=1)], f.epilogue)


def read(config: Keys) -> dict[str, Any]:
    """Read which layers have RoPE: a list with 1 for these layers and 0 for others, or else an interval."""
    layers, interval = config.count("num_hidden_layers"), config.count("no_rope_layer_interval", 4)
    rotated = None if config.get("no_rope_layers") is None else config.numbers("no_rope_layers")
    if interval < 1 or (rotated is not None and len(rotated) < layers):
        raise MegakernelError(
            f"{config.source}: no_rope_layers and no_rope_layer_interval do not say which layers have RoPE"
        )
    config.only("use_sliding_window", False)
    config.only("layer_types", ["full_attention"] * min(layers, MOST_LAYERS))
    nope = tuple(every_nth(layers, interval)) if rotated is None else tuple(i for i in range(layers) if not rotated[i])
    return {**llama.biases(config), "nope_layers": nope}


def read_gguf(config: Keys) -> dict[str, Any]:
    """llama.cpp assumes that every fourth layer has no RoPE."""
    return {"nope_layers": tuple(every_nth(config.count("block_count"), 4))}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    ("smollm3",),
    forward,
    llama.WEIGHTS,
    read,
    frozenset(
        {"attention_bias", "layer_types", "max_window_layers", "mlp_bias", "no_rope_layer_interval", "no_rope_layers"}
        | {"sliding_window", "use_sliding_window"}
    ),
    defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
    read_gguf=read_gguf,
)
