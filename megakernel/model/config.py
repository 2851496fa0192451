"""The shape of a model, independent of its file format, and the keys of the files that declare it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard

import numpy as np

from ..errors import MegakernelError
from ..isa import Dtype, ModelSizes, from_f32, to_f32


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    FACTORS = "factors"  # each RoPE pair has a divisor of its frequency, as in GGUF files of Llama 3.1


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model.

    `factor` divides all frequencies (LINEAR) or only the low ones (LLAMA3, YARN), and `attention` multiplies all
    cosines and sines. A frequency is low if it turns fewer than `low_freq_factor` times within `original_context`
    tokens (YaRN's beta_slow), and it is not changed above `high_freq_factor` turns (beta_fast). YaRN interpolates
    between the RoPE pairs at these borders, which are whole numbers if `truncate` is true. `factors` divide the
    frequencies one by one. With LONGROPE, `short_factors` take their place if the context is not longer than
    `original_context`. With `ends`, contexts end there, because behind it queries are scaled by their position, which
    no operation does. Only the first `dims` elements of a head are rotated; 0 means all.
    """

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    truncate: bool = True
    attention: float = 1.0
    ends: bool = False
    dims: int = 0

    def longest(self, context: int) -> int:
        """The longest context of a model whose file names `context`. Files with YaRN often name the shorter context
        that the model had before. As in vLLM, they get the longer one.
        """
        if self.ends:
            return min(context, self.original_context)
        extended = int(self.original_context * min(self.factor, 1e9)) if self.kind is RopeKind.YARN else 0
        return max(context, extended)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. RoPE does not rotate in the layers `nope_layers`. If a layer has `experts`, `ffn` is the
    width of one of them, and with `normalised_routes` the weights of a token's experts are divided by their sum. With
    `clipped_gates`, experts have the gate of gpt-oss.

    In all layers except `full_layers`, a row attends to `window` tokens, its own included; 0 means that no layer has a
    sliding window. RoPE has the base `local_theta` in these layers, without any scaling, unless it is 0. With
    `post_norms`, what a layer adds to the residual is normalised first. With `whole_norms`, q and k are normalised,
    each over all heads. With `rounds_embedding`, the embeddings' multiplier is rounded to the compute type.

    Embeddings are multiplied by `embedding_multiplier`, what a layer adds to the residual by `residual_multiplier`,
    and attention scores by `attention_multiplier` (None: 1 / sqrt(head_dim)). Logits are divided by `logits_scaling`.
    These numbers are folded into the sizes, the RoPE table and the scale of the last norm. The residual is divided by
    its multiplier, so that what layers add needs no multiplication; with an epsilon that is divided by the square of
    the multiplier, RMS norms have the same results.
    """

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
    experts: int = 0
    experts_per_token: int = 0
    normalised_routes: bool = False
    clipped_gates: bool = False
    nope_layers: tuple[int, ...] = ()
    window: int = 0
    full_layers: tuple[int, ...] = ()
    local_theta: float = 0.0
    post_norms: bool = False
    whole_norms: bool = False
    rounds_embedding: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def sizes(self, dtype: Dtype, *, quantised_kv: bool = False, q8_activations: bool = False) -> ModelSizes:
        """The sizes of the model when it computes in `dtype`."""
        names = ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "experts", "experts_per_token")
        own = {name: getattr(self, name) for name in names}
        own |= {"normalised_routes": int(self.normalised_routes), "clipped_gates": int(self.clipped_gates)}
        own["rms_eps"] = self.rms_eps / self.residual_multiplier**2
        own["embed_scale"] = self.embedding_multiplier / self.residual_multiplier
        if self.rounds_embedding:
            own["embed_scale"] = float(to_f32(from_f32(np.array([own["embed_scale"]], np.float32), dtype), dtype)[0])
        own |= {"post_norms": int(self.post_norms), "whole_norms": int(self.whole_norms)}
        if 0 < self.window < self.max_context:
            own |= {"window": self.window} | self.full_places()
        return ModelSizes(**own, dtype=int(dtype), quantised_kv=int(quantised_kv), q8_activations=int(q8_activations))

    def full_places(self) -> dict[str, int]:
        """The fields of ModelSizes that say which layers have no window: those before a first one with a window, then
        some at equal distances. `check_config` refuses other `full_layers`.
        """
        full = set(self.full_layers)
        first = next(layer for layer in itertools.count() if layer not in full)
        rest = sorted(layer for layer in full if layer > first)
        every = rest[1] - rest[0] if len(rest) > 1 else self.layers
        return {"window_from": first, "full_every": every, "full_at": rest[0] % every if rest else every}


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
        if not _finite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """The token ids of a key whose value is one id, a list of ids or null. Files also write -1 for none."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < 1 << 63 for i in ids):
            raise self._wrong(key, "token ids")
        return tuple(i for i in ids if i != -1)

    def numbers(self, key: str) -> tuple[float, ...]:
        """The numbers of a key whose value is a list of finite numbers."""
        if not isinstance(value := self.get(key), list) or not all(map(_finite, value)):
            raise self._wrong(key, "a list of finite numbers")
        return tuple(map(float, value))

    def names(self, key: str, *allowed: str) -> list[str]:
        """The list of names at a key, empty if its value is null. Raises an error for a name that is not `allowed`."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(name in allowed for name in value):
            raise self._wrong(key, "a list of " + " and ".join(allowed))
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        if not isinstance(value := self.get(key), bool | None):
            raise self._wrong(key, "true or false")
        return default if value is None else value

    def only(self, key: str, *allowed: object, default: object = None) -> None:
        """Refuse any value but null and `allowed`. An absent key has the value `default`."""
        value = self.raw.get(self.prefix + key, default)
        if value is not None and value not in allowed:
            known = " or ".join(map(short, allowed)) or "null"
            raise MegakernelError(f"{self.source}: {self.prefix}{key} = {short(value)} is not supported, only {known}")

    def _wrong(self, key: str, what: str) -> MegakernelError:
        return MegakernelError(f"{self.source}: {self.prefix}{key} is {short(self.get(key))}, not {what}")


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def short(value: Any) -> str:
    """`value` as JSON of 60 characters at most, for an error."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
