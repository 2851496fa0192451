"""Reads weights that are in memory already: those of a transformers model, or named tensors of torch or NumPy."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dtype, all_finite
from .checkpoint import Checkpoint
from .config import ModelConfig
from .file_checkpoint import FileCheckpoint, Tensors, stored
from .hf_config import parse_hf_config
from .safetensors_checkpoint import checkpoint_of

_KINDS = {"float32": Dtype.F32, "float16": Dtype.F16, "bfloat16": Dtype.BF16}


def _tensors(given: Any) -> Tensors:
    """Wrap tensors in memory as if they came from a file. Raises MegakernelError if a weight is not finite. Only
    tensors that are not contiguous in the CPU's memory are copied."""
    if hasattr(given, "state_dict"):  # a transformers model: give its tensors the names in published files
        model, given = given, given.state_dict()
        if hasattr(loading := importlib.import_module("transformers"), "core_model_loading"):
            given = loading.core_model_loading.revert_weight_conversion(model, given)
        given = given.items()
    found = Tensors()
    for name, value in given:
        kind, array = _array(name, value)
        if 0 in array.shape or not array.ndim:
            raise MegakernelError(f"tensor {name} must have axes and elements: its shape is {list(array.shape)}")
        if not all_finite(array, kind):
            raise MegakernelError(f"tensor {name} contains a NaN or an infinity")
        found[name] = stored(Path("memory"), array.shape, kind, array.reshape(-1).view(np.uint8))
    return found


def _array(name: str, value: Any) -> tuple[Dtype, NDArray[np.generic]]:
    """Return the type of a tensor of torch or NumPy, and its elements: bfloat16 as uint16."""
    given = str(getattr(value, "dtype", type(value))).removeprefix("torch.")
    if (kind := _KINDS.get(given)) is None:
        raise MegakernelError(f"tensor {name} has type {given}, not one of {', '.join(_KINDS)}")
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        value = (value.view(importlib.import_module("torch").int16) if kind is Dtype.BF16 else value).numpy()
    return kind, np.ascontiguousarray(value).view(kind.numpy)


def open_memory(model: Any) -> Checkpoint:
    """Open a transformers model, or a tuple (configuration, weights). The configuration is a dict or a transformers
    object. The weights are pairs (name, tensor), named as in published files. A Checkpoint is returned as it is.
    Raises MegakernelError."""
    if not isinstance(model, tuple) and not hasattr(model, "state_dict"):
        return model  # type: ignore[no-any-return]
    config, tensors = model if isinstance(model, tuple) else (model.config, model)
    raw = dict(config) if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    if (generation := getattr(model, "generation_config", None)) is not None and generation.eos_token_id is not None:
        raw["eos_token_id"] = generation.eos_token_id
    return checkpoint_of(parse_hf_config(raw, "the model's config"), _tensors(tensors), "model")


def replacement(config: ModelConfig, weights: Any) -> FileCheckpoint:
    """Return a checkpoint that has only the new `weights`: a transformers model, or pairs (name, tensor). Raises
    MegakernelError for a tensor that does not fit `config`."""
    return checkpoint_of(config, _tensors(weights), "the new weights", some=True)
