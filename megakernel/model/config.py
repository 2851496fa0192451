"""The shape of a model, independent of its file format, and the keys of the files that declare it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import MegakernelError
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


@dataclass(frozen=True)
class Keys:
    """Reads the keys of a configuration file. Every method raises a MegakernelError that names the file and the key."""

    raw: dict[str, Any]
    source: str
    prefix: str = ""  # of every key that the methods name

    def get(self, key: str) -> Any:
        return self.raw.get(self.prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise MegakernelError(f"{self.source}: {self.prefix}{key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
            raise self._wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self._wrong(key, "a finite number")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """The token ids of a key whose value is one id, a list of ids or null."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < 1 << 63 for i in ids):
            raise self._wrong(key, "token ids")
        return tuple(ids)

    def flag(self, key: str) -> bool:
        if not isinstance(value := self.get(key), bool | None):
            raise self._wrong(key, "true or false")
        return bool(value)

    def only(self, key: str, *allowed: object, default: object = None) -> None:
        """Refuse any value but null and `allowed`. An absent key has the value `default`."""
        value = self.raw.get(self.prefix + key, default)
        if value is not None and value not in allowed:
            known = " or ".join(map(short, allowed)) or "null"
            raise MegakernelError(f"{self.source}: {self.prefix}{key} = {short(value)} is not supported, only {known}")

    def _wrong(self, key: str, what: str) -> MegakernelError:
        return MegakernelError(f"{self.source}: {self.prefix}{key} is {short(self.get(key))}, not {what}")


def short(value: Any) -> str:
    """`value` as JSON of 60 characters at most, for an error."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
