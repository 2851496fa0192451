"""The model families. Each file describes one family's forward pass as a list of phases."""

from __future__ import annotations

from ...isa import BUFFERS, Buffer, Forward, Space
from ..config import ModelConfig
from .ernie4_5 import ERNIE4_5
from .family import Family
from .gemma import GEMMA, GEMMA3
from .glm import GLM
from .glm4 import GLM4
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .lacking import LACKING
from .llama import LLAMA
from .mistral import MINISTRAL, MINISTRAL3, MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2, OLMO3
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3

# Of two families with the same name in GGUF files, the first reads them.
_ALL = (
    ERNIE4_5, GEMMA, GEMMA3, GLM, GLM4, GPT_OSS, GRANITE, LLAMA, MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL, OLMO2, OLMO3,
    PHI3, QWEN2, QWEN3, QWEN3_MOE, SEED_OSS, SMOLLM3,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}

__all__ = ["FAMILIES", "LACKING", "Family", "forward", "weights"]


def forward(config: ModelConfig) -> Forward:
    """The phases of a model's step on one device."""
    return FAMILIES[config.family].forward(config)


def weights(config: ModelConfig) -> list[Buffer]:
    """The weight buffers that a model has, in the order of their numbers. A tied LM head is included."""
    named = {value for phase in forward(config) for value in vars(phase).values() if isinstance(value, Buffer)}
    return [buffer for buffer, spec in BUFFERS.items() if spec.space is Space.WEIGHT and buffer in named]
