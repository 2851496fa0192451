"""The model families. Each file describes one family's forward pass as a list of phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...isa import BUFFERS, Buffer, Dims, Forward, Phase, Space
from ..config import ModelConfig
from .family import Family, Norm
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}

__all__ = ["FAMILIES", "Family", "Norm", "forward", "weights"]


def forward(
    config: ModelConfig, dims: Dims, norm: Norm = Norm.OWN, weight_bits: Mapping[Buffer, float] | None = None
) -> Forward:
    """The phases of a model's step, divided among ranks as `dims` says.

    `weight_bits` gives the bits per weight of each buffer that is not stored in the compute type.
    """
    made = FAMILIES[config.family].forward(config, dims, norm)

    def stored(phase: Phase) -> Phase:
        bits = (weight_bits or {}).get(phase.weights) if phase.reads_weights and phase.weights is not None else None
        return replace(phase, weight_bits=bits)

    return Forward.of(*(tuple(map(stored, segment)) for segment in made.segments)) if weight_bits else made


def weights(config: ModelConfig, dims: Dims) -> list[Buffer]:
    """The weight buffers that a model has, in the order of their numbers. A tied LM head is included."""
    named = {value for phase in forward(config, dims) for value in vars(phase).values() if isinstance(value, Buffer)}
    return [buffer for buffer, spec in BUFFERS.items() if spec.space is Space.WEIGHT and buffer in named]
