"""The shape of a model, independent of its file format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..isa import Dtype, ModelSizes


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"  # each RoPE pair has a divisor of its frequency, as in GGUF files of Llama 3.1


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model. `factor` divides all frequencies (LINEAR) or only the low ones (LLAMA3)."""

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float = 1e-5
    rope: Rope = Rope()
    tied: bool = False
    family: str = "llama"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def sizes(self, dtype: Dtype, *, quantised_kv: bool = False) -> ModelSizes:
        """The sizes of the model when it computes in `dtype`."""
        names = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "rms_eps")
        own = {name: getattr(self, name) for name in names}
        return ModelSizes(**own, dtype=int(dtype), quantised_kv=int(quantised_kv))
