"""Reads weights that are in memory already: those of a transformers model, or named tensors of torch or NumPy."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dtype, all_finite
from .checkpoint import Checkpoint
from .config import ModelConfig
from .families import FAMILIES
from .file_checkpoint import FileCheckpoint, TensorFile, expected_buffers, expected_shapes
from .hf_config import parse_hf_config
from .safetensors_checkpoint import PREFIXES, SafetensorsFiles, Tensor, check_tied, checkpoint_of, safetensors_naming
from .split_experts import split_experts

Named = Iterable[tuple[str, Any]]
_KINDS = {"float32": Dtype.F32, "float16": Dtype.F16, "bfloat16": Dtype.BF16}
_HERE = Path("memory")  # what errors name in place of a file


class _Tensors(SafetensorsFiles):
    """Tensors in memory as a TensorFile. The constructor checks that all weights are finite, and copies none that lie
    in one piece in the memory of the CPU."""

    def __init__(self, tensors: Named) -> None:
        self.left_out, self.shapes, self._tensors = 0, {}, {}
        for name, value in tensors:
            kind, array = _array(name, value)
            if 0 in array.shape or not array.ndim:
                raise MegakernelError(f"tensor {name} is empty: its shape is {list(array.shape)}")
            rows = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
            if not all_finite(rows, kind):
                raise MegakernelError(f"tensor {name} contains a NaN or an infinity")
            self.shapes[name] = array.shape
            self._tensors[name] = Tensor(_HERE, kind.name, rows.view(np.uint8))


def _array(name: str, value: Any) -> tuple[Dtype, NDArray[np.generic]]:
    """Return the type of a tensor of torch or NumPy, and its elements: bfloat16 as uint16."""
    kind = _KINDS.get(str(getattr(value, "dtype", type(value))).removeprefix("torch."))
    if kind is None:
        raise MegakernelError(
            f"tensor {name} has type {getattr(value, 'dtype', type(value))}, not one of {', '.join(_KINDS)}"
        )
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        value = (value.view(importlib.import_module("torch").int16) if kind is Dtype.BF16 else value).numpy()
    return kind, np.ascontiguousarray(value).view(kind.numpy)


def is_model(model: Any) -> bool:
    """Whether `open_memory` accepts `model`."""
    return isinstance(model, tuple) or hasattr(model, "state_dict")


def open_memory(model: Any) -> Checkpoint:
    """Open a transformers model, or a tuple of a configuration (a dict, or an object of transformers) and an iterable
    of pairs (name, tensor), with the names in published files. Raises MegakernelError."""
    config, tensors = model if isinstance(model, tuple) else (model.config, named_tensors(model))
    raw = dict(config) if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    if (generation := getattr(model, "generation_config", None)) is not None and generation.eos_token_id is not None:
        raw["eos_token_id"] = generation.eos_token_id
    return checkpoint_of(parse_hf_config(raw, "the model's config"), _Tensors(tensors), "model")


def named_tensors(model: Any) -> Named:
    """Return the tensors of a transformers model, with the names in published files."""
    state = model.state_dict()
    if hasattr(loading := importlib.import_module("transformers"), "core_model_loading"):
        state = loading.core_model_loading.revert_weight_conversion(model, state)
    pairs: Named = state.items()
    return pairs


class _Part:
    """Some tensors of a model as a TensorFile. The others have shapes, but are never read."""

    def __init__(self, given: TensorFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._given, self.shapes = given, {**shapes, **given.shapes}

    def where(self, name: str) -> Path:
        return _HERE

    def dtype(self, name: str) -> Dtype:
        return self._given.dtype(name) if name in self._given.shapes else Dtype.F32

    def rows(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        return self._given.rows(name, start, end)


def replacement(config: ModelConfig, tensors: Named) -> tuple[Checkpoint, set[tuple[Buffer, int]]]:
    """Return a checkpoint with some new weights of a model, and the buffers and layers that it has. All tensors that
    form one of them, such as those of q, k and v, must come together. Raises MegakernelError."""
    naming, files = safetensors_naming(config), _Tensors(tensors)
    expected = expected_shapes(naming)
    files.use(FAMILIES[config.family])
    for old, new in PREFIXES:
        if any(n not in expected and n.startswith(old) and new + n.removeprefix(old) in expected for n in files.shapes):
            files.rename(old, new)
    check_tied(config, files)
    given, places = split_experts(files), set()
    for buffer in expected_buffers(config):
        for layer in range(config.layers if BUFFERS[buffer].layered else 1):
            names = naming.names(buffer, layer)
            absent = [name for name in names if name not in given.shapes]
            if absent and len(absent) < len(names):
                some = next(name for name in names if name not in absent)
                raise MegakernelError(f"tensor {absent[0]} is missing: it must come together with {some}")
            places |= set() if absent else {(buffer, layer)}
    if config.tied and (Buffer.EMBED, 0) in places:
        places.add((Buffer.LM_HEAD, 0))
    return FileCheckpoint("the new weights", _Part(given, expected), naming), places
