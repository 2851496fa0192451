"""The model families. Each describes its forward pass as a list of phases, and how to read its files."""

from __future__ import annotations

from ...isa import BUFFERS, Buffer, Forward, Space
from ..config import ModelConfig
from .experts import GPT_OSS, GRANITE_MOE, MIXTRAL, OLMOE, QWEN3_MOE
from .family import Family
from .lacking import LACKING
from .like_llama import (
    CWM,
    ERNIE4_5,
    EXAONE,
    GEMMA,
    GLM,
    GRANITE,
    GRANITE_HYBRID,
    INTERNLM3,
    IQUEST_CODER,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from .llama import LLAMA
from .post_norms import EXAONE4, GEMMA3, GLM4, OLMO2, OLMO3

# Of two families with the same name in GGUF files, the first reads them.
_ALL = (
    LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA3, GPT_OSS, PHI3, OLMO2, OLMO3,
    OLMOE, SMOLLM3, GRANITE, GRANITE_MOE, GRANITE_HYBRID, GLM, GLM4, ERNIE4_5, SEED_OSS, CWM, EXAONE, EXAONE4,
    INTERNLM3, IQUEST_CODER,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def table() -> str:
    """The table of families in docs/models.md."""
    names = {f.name: ", ".join(f"`{name}`" for name in f.gguf) or "—" for f in _ALL}
    return "".join(f"| `{f.name}` | {names[f.name]} | {f.models} |\n" for f in _ALL)


def forward(config: ModelConfig) -> Forward:
    """The phases of a model's step on one device."""
    family = FAMILIES[config.family]
    return family.forward(config, family)


def weights(config: ModelConfig) -> list[Buffer]:
    """The weight buffers that a model has, in the order of their numbers. A tied LM head is included."""
    named = {value for phase in forward(config) for value in vars(phase).values() if isinstance(value, Buffer)}
    return [buffer for buffer, spec in BUFFERS.items() if spec.space is Space.WEIGHT and buffer in named]


def places(config: ModelConfig) -> list[tuple[Buffer, int]]:
    """Each weight buffer with each of its layers. A buffer without layers counts as one layer."""
    layers = range(config.layers)
    return [(buffer, layer) for buffer in weights(config) for layer in (layers if BUFFERS[buffer].layered else (0,))]
