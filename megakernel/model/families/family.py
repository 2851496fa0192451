"""The fields that each model family declares: its phases, its weight names and its config.json keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig


@dataclass(frozen=True)
class Weight:
    """Names the tensors that contain a buffer's rows, in safetensors and in GGUF files, in the order of the rows. `{}`
    stands for the layer's number. A repeated name means one tensor that contains the rows of several matrices.

    The rows of the first `rotated` tensors are rotated by RoPE. If `plus_one` is true, a safetensors file contains each
    weight minus 1, and 1 is added when the file is read.
    """

    safetensors: tuple[str, ...]
    gguf: tuple[str, ...]
    rotated: int = 0
    plus_one: bool = False


@dataclass(frozen=True)
class Family:
    """Declares a model family: its forward pass, and how to read its files.

    `name`           `model_type` in config.json
    `architecture`   the class name in config.json
    `gguf`           the architecture's names in GGUF files; the first is used when a file is written
    `weights`        the tensor names of each buffer
    `interleaved`    whether the two rows of a RoPE pair are adjacent in GGUF files
    `read`           returns fields of ModelConfig that the reader of config.json does not set for all families. Its
                     result may also have the entry `longest`, a limit of the context in tokens.
    `keys`           the keys of config.json that only this family has
    `defaults`       the values of keys that are absent in config.json, where they are not those of Llama. The key
                     `partial_rotary_factor` is supported only if it is listed here.
    `activations`    the allowed names of the MLP's activation in config.json
    `two_ropes`      `rope_parameters` in config.json has one table for layers with sliding windows, one for others
    `read_gguf`      as `read`, but for GGUF files. If its result has no `window`, no layer gets a sliding window, and a
                     window in the file limits the context instead.
    `gguf_keys`      as `keys`, but for GGUF files
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
