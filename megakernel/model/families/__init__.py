"""The model families. Each describes its forward pass as a list of phases, and how to read its files."""

from __future__ import annotations

from ...isa import BUFFERS, Buffer, Forward, Space
from ..config import ModelConfig
from . import experts, like_llama, llama, post_norms
from .family import Family
from .lacking import LACKING as LACKING

# All families in these modules. If GGUF files use one name for two families, the first family reads them.
_MODULES = (llama, like_llama, experts, post_norms)
FAMILIES: dict[str, Family] = {f.name: f for module in _MODULES for f in vars(module).values() if isinstance(f, Family)}


def forward(config: ModelConfig) -> Forward:
    """The phases of a model's step on one device."""
    family = FAMILIES[config.family]
    return (family.forward or llama.forward)(config, family)


def weights(config: ModelConfig) -> list[Buffer]:
    """The weight buffers that a model has, in the order of their numbers. A tied LM head is included."""
    named = {value for phase in forward(config) for value in vars(phase).values() if isinstance(value, Buffer)}
    return [buffer for buffer, spec in BUFFERS.items() if spec.space is Space.WEIGHT and buffer in named]


def places(config: ModelConfig) -> list[tuple[Buffer, int]]:
    """All pairs of a weight buffer and one of its layers. A buffer without layers counts as one layer."""
    return [(buffer, layer) for buffer in weights(config) for layer in BUFFERS[buffer].layers(config)]
