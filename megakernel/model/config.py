"""The sizes and properties of a model, independent of the file format, and a reader for configuration files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any

import msgspec
import numpy as np

from ..errors import MegakernelError
from ..isa import Buffer, Dtype, ModelSizes, Shape, from_f32, to_f32


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    FACTORS = "factors"  # each RoPE pair has its own divisor of the frequency, as in GGUF files of Llama 3.1


@dataclass(frozen=True)
class Rope:
    """A model's rotary position embedding (RoPE), with its scaling for long contexts. `kind` is the scaling method.

    LINEAR divides all frequencies by `factor`. LLAMA3 and YARN divide only low frequencies, keep high ones, and blend
    in between. A frequency is low if its RoPE pair turns fewer than `low_freq_factor` times within `original_context`
    tokens, and high if the pair turns more than `high_freq_factor` times. YaRN calls these two limits beta_slow and
    beta_fast. If `truncate` is true, YaRN rounds the limits to whole RoPE pairs.

    LONGROPE and FACTORS divide each frequency by its own number in `factors`. LONGROPE uses `short_factors` instead if
    the context is at most `original_context`.

    `attention` multiplies all cosines and sines. If `dims` is not 0, only the first `dims` elements of a head are
    rotated. If `ends` is true, the context is limited to `original_context`, because later queries would need a scale
    that is not supported.
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
        """Return the model's longest context. `context` is the length in the model's file. With YaRN, many files give
        the length before the extension; the result is then the extended length, as in vLLM."""
        if self.ends:
            return min(context, self.original_context)
        extended = int(self.original_context * min(self.factor, 1e9)) if self.kind is RopeKind.YARN else 0
        return max(context, extended)


@dataclass(frozen=True)
class ModelConfig(Shape):
    """The sizes and properties of a model. Most fields have the names of config.json.

    The multipliers become part of other numbers: `embed_scale`, the scales of the last norm, the RoPE table and the
    epsilon of norms. The residual is kept divided by `residual_multiplier`, so that what layers add needs no
    multiplication. Norms give the same results, because their epsilon is divided by the square of this multiplier.
    """

    max_context: int
    rms_eps: float = 1e-5
    rope: Rope = Rope()
    tied: bool = False
    family: str = "llama"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # each head of q and k is normalised before RoPE (always so if `Family.head_norms`)
    nope_layers: tuple[int, ...] = ()  # layers without RoPE
    full_layers: tuple[int, ...] = ()  # layers without a sliding window, which has `window` tokens in all others
    local_theta: float = 0.0  # if not 0, layers with a window have an unscaled RoPE with this base
    rounds_embedding: bool = False  # `embedding_multiplier` is rounded to the compute type
    shared_ffn: int = 0  # width of the MLP that all tokens use; its pieces, as wide as an expert, count as experts
    dense_ffn: int = 0  # width of the MLP of layers without a router; its pieces count as experts of all tokens
    embedding_multiplier: float = 1.0  # multiplies embeddings
    residual_multiplier: float = 1.0  # multiplies the outputs of attention and of the MLP
    attention_multiplier: float | None = None  # multiplies attention scores; None means 1 / sqrt(head_dim)
    logits_scaling: float = 1.0  # divides logits
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def sizes(self, dtype: Dtype, *, quantised_kv: bool = False, q8_activations: bool = False) -> ModelSizes:
        """The model's sizes for the compute type `dtype`, with a quantised KV cache or rounded activations if asked."""
        common = {field.name for field in fields(self)} & {field.name for field in fields(ModelSizes)}
        own: dict[str, Any] = {name: getattr(self, name) for name in common - {"window"}}
        own = {name: value if isinstance(value, float) else int(value) for name, value in own.items()}
        own["rms_eps"] = self.rms_eps / self.residual_multiplier**2
        own["embed_scale"] = self.embedding_multiplier / self.residual_multiplier
        if self.rounds_embedding:
            own["embed_scale"] = float(to_f32(from_f32(np.array([own["embed_scale"]], np.float32), dtype), dtype)[0])
        if 0 < self.window < self.max_context:
            own |= {"window": self.window} | self.full_places()
        return ModelSizes(**own, dtype=int(dtype), quantised_kv=int(quantised_kv), q8_activations=int(q8_activations))

    def bias(self, buffer: Buffer) -> Buffer | None:
        """Return `buffer`, a buffer of biases, if the model has these biases; otherwise None."""
        router = self.mlp_bias or bool(self.choice_bias)
        has = {Buffer.B_QKV: self.qkv_bias, Buffer.B_O: self.o_bias, Buffer.B_ROUTER: router}
        return buffer if has.get(buffer, self.mlp_bias) else None

    def full_places(self) -> dict[str, int]:
        """Return the fields of ModelSizes that say which layers have no sliding window. The fields can only express
        that some first layers, and then every n-th layer, have none. `check_config` refuses other `full_layers`."""
        full = set(self.full_layers)
        first = next(layer for layer in itertools.count() if layer not in full)
        rest = sorted(layer for layer in full if layer > first)
        every = rest[1] - rest[0] if len(rest) > 1 else self.layers
        return {"window_from": first, "full_every": every, "full_at": rest[0] % every if rest else every}


_Whole = Annotated[int, msgspec.Meta(gt=-(1 << 63), le=(1 << 63) - 1)]
_Finite = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]


@dataclass(frozen=True)
class Keys:
    """Reads the keys of a configuration file, and notes which were read. Methods take the names of config.json. In a
    GGUF file, some keys have `other_names`, and all have a `prefix`. An invalid value raises MegakernelError, which
    names file and key."""

    raw: dict[str, Any]
    source: str
    prefix: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @property
    def gguf(self) -> bool:
        """Whether the keys are a model's in a GGUF file."""
        return bool(self.other_names)

    def name(self, key: str) -> str:
        """The name in the file of a key of config.json."""
        return self.prefix + self.other_names.get(key, key)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(name := self.name(key))
        return self.raw.get(name, default)

    def count(self, key: str, default: int | None = None) -> int:
        number: int = self._read(key, _Whole, "a whole number", default)
        return number

    def number(self, key: str, default: float | None = None) -> float:
        number: float = self._read(key, _Finite, "a finite number", default)
        return number

    def ids(self, key: str) -> tuple[int, ...]:
        """The token ids at a key whose value is one id, a list of ids, or null. Some files contain -1 for no id.
        In some GGUF files, this -1 has become the unsigned number 2^32 - 1."""
        found = self._read(key, _Whole | list[_Whole], "token ids", [])
        return tuple(i for i in (found if isinstance(found, list) else [found]) if i not in (-1, 2**32 - 1))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return the numbers at a key whose value must be a list of finite numbers."""
        return tuple(self._read(key, list[_Finite], "a list of finite numbers"))

    def names(self, key: str, *allowed: str) -> list[str]:
        """Return the list of names at a key; [] if it is null. Raises MegakernelError for names not `allowed`."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(name in allowed for name in value):
            raise self._wrong(key, "a list of " + " and ".join(allowed))
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        flag: bool = self._read(key, bool, "true or false", default)
        return flag

    def fields(self, table: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        """Return the values of several fields. `table` has each field's key and default. The default is the value if
        the key is absent, and it determines the type. If the default is None, the key must have a count."""
        read: dict[type, Callable[[str, Any], Any]] = {bool: self.flag, float: self.number}
        return {name: read.get(type(default), self.count)(key, default) for name, (key, default) in table.items()}

    def sampling(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the file's sampling parameters. `names` maps each possible key to a field of SamplingParams."""
        given = {key: name for key, name in names.items() if self.get(key) is not None}
        whole = ("top_k", "max_tokens")
        return {name: self.count(key) if name in whole else self.number(key) for key, name in given.items()}

    def only(self, key: str, *allowed: object, default: object = None) -> None:
        """Raise MegakernelError unless a key's value is null or in `allowed`. An absent key counts as `default`."""
        value = self.get(key, default)
        if value is not None and value not in allowed:
            known = " or ".join(map(short, allowed)) or "null"
            raise MegakernelError(
                f"{self.source}: {self.name(key)} = {short(value)} is not supported: it must be {known}"
            )

    def refuse_others(self, ignored: Set[str]) -> None:
        """Raise MegakernelError for a key that has not been read, because it may change the model's results. Keys in
        `ignored` are allowed, and values that are null, false, zero or empty."""
        for key in sorted(key for key in self.raw if key.startswith(self.prefix)):
            if (value := self.raw[key]) and key not in self.used and key.removeprefix(self.prefix) not in ignored:
                if isinstance(value, dict):  # an error shows the start of the value
                    value = {
                        name: what for name, what in value.items() if name in ("quant_method", "quant_algo")
                    } | value
                what = f"{key} = {short(value)} is not supported and may change the result"
                raise MegakernelError(f"{self.source}: {what}")

    def _read(self, key: str, kind: Any, what: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if it is null or absent. Errors describe allowed values by `what`."""
        if (value := self.get(key)) is None and (value := default) is None:
            raise MegakernelError(f"{self.source}: {self.name(key)} is missing: it must be {what}")
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as e:
            raise self._wrong(key, what) from e

    def _wrong(self, key: str, what: str) -> MegakernelError:
        return MegakernelError(f"{self.source}: {self.name(key)} is {short(self.get(key))}, not {what}")


def short(value: Any) -> str:
    """Return `value` as JSON, cut to at most 60 characters, for an error message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
