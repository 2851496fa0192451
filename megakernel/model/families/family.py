"""The fields that each model family declares: its phases, its weight names and its config.json keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig


@dataclass(frozen=True)
class Weight:
    """The tensor names of a buffer in safetensors and GGUF files, in the order of its rows. `{}` is the layer's number.
    A name that is repeated is one tensor with the rows of several matrices.

    The rows of the first `rotated` tensors form RoPE pairs. With `plus_one`, safetensors files have values that are 1
    less than the weights.
    """

    safetensors: tuple[str, ...]
    gguf: tuple[str, ...]
    rotated: int = 0
    plus_one: bool = False


@dataclass(frozen=True)
class Family:
    """A model family. `name` is the `model_type` of config.json, and `architecture` is the class that config.json
    lists. `gguf` has the names of the architecture in GGUF files, first the one that is written.

    `weights` maps each buffer to its tensor names. `interleaved` says that the rows of a RoPE pair are adjacent in GGUF
    files. `read` returns the ModelConfig fields that follow from the family, or from the config.json keys that only
    this family has, which `keys` lists. Its entry `longest`, if any, limits the context, in tokens. `defaults` has the
    values of other config.json keys that are absent, where they are not those of Llama; the key `partial_rotary_factor`
    also says that the family supports it. `read_gguf` and `gguf_keys` are `read` and `keys` for GGUF files. If
    `read_gguf` returns no `window`, the window of a file limits the context. `activations` has the names of the MLP's
    activation in config.json. With `two_ropes`, the key `rope_parameters` has one table for layers with sliding windows
    and another one for all other layers.
    """

    name: str
    architecture: str
    gguf: tuple[str, ...]
    forward: Callable[[ModelConfig], Forward]
    weights: Mapping[Buffer, Weight]
    read: Callable[[Keys], dict[str, Any]]
    keys: frozenset[str] = frozenset()
    interleaved: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read_gguf: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    gguf_keys: frozenset[str] = frozenset()
    activations: tuple[str, ...] = ("silu", "swish")
    two_ropes: bool = False
