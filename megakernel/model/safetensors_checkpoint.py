"""Reads the weights in Hugging Face folders: `model.safetensors`, or several files with `model.safetensors.index.json`.

A file has an 8-byte little-endian header length, a JSON header with the dtype, shape and data_offsets of each tensor,
and the data (huggingface.co/docs/safetensors). The package safetensors is not used, because it cannot return bfloat16
as NumPy arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dtype
from .config import ModelConfig
from .families import FAMILIES, Family
from .file_checkpoint import FileCheckpoint, Naming, check_ranges, damaged, expected_shapes, map_file
from .folder import INDICES, shards
from .hf_config import read_hf_config
from .split_experts import split_experts

_FLOATS = {kind.name: kind.numpy.newbyteorder("<") for kind in (Dtype.F32, Dtype.F16, Dtype.BF16)}
_DTYPES = {**_FLOATS, "U8": np.dtype(np.uint8)}  # U8 tensors have quantised weights (split_experts.py)
_HEADER_LIMIT = 100_000_000  # the format's limit on the length of a header, in bytes
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# Prefixes of tensor names, each with the usual prefix that replaces it. Embedding models, which have no LM head, have
# no prefix. Models that also see images have one of the other two, written by older or newer software.
_PREFIXES = (("", "model."), ("language_model.", ""), ("model.language_model.", "model."))
_OF_IMAGES = tuple(
    f"{outer}{part}." for outer in ("", "model.") for part in ("multi_modal_projector", "vision_tower", "visual")
)


class Tensor(NamedTuple):
    """A tensor, the file that has it, and the name of its type."""

    path: Path
    dtype: str
    data: NDArray[np.uint8]  # [rows, bytes of a row]


class SafetensorsFiles:
    """All safetensors files of a folder as a TensorFile. The constructor checks the headers and maps the files.
    `left_out` counts the tensors that only images need."""

    def __init__(self, folder: Path) -> None:
        self.left_out = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, Tensor] = {}
        single, index = (folder / name for name in INDICES)
        if single.exists():
            self._open(single)
        elif index.exists():
            self._open_shards(folder, index)
        else:
            raise MegakernelError(f"{folder} holds neither {single.name} nor {index.name}: only safetensors are read")

    def rename(self, old: str, new: str) -> None:
        """In names of tensors, replace the prefix `old` by `new`."""
        self._change(lambda name: new + name.removeprefix(old) if name.startswith(old) else name)

    def use(self, family: Family) -> None:
        """Give all tensors the family's usual names, and leave out those that only images need."""

        def usual(name: str) -> str:
            for part, other in family.renames.items():
                name = name.replace(part, other)
            return name

        kept = {name: shape for name, shape in self.shapes.items() if not name.startswith(_OF_IMAGES)}
        self.left_out, self.shapes = len(self.shapes) - len(kept), kept
        self._change(usual)

    def _change(self, change: Callable[[str], str]) -> None:
        names = {name: change(name) for name in self.shapes}
        self.shapes = {renamed: self.shapes[name] for name, renamed in names.items()}
        self._tensors = {renamed: self._tensors[name] for name, renamed in names.items()}

    def where(self, name: str) -> Path:
        return self._tensors[name].path

    def dtype(self, name: str) -> Dtype:
        tensor = self._tensors[name]
        if tensor.dtype not in _FLOATS:
            raise _unsupported(tensor.path, name, tensor.dtype)
        return Dtype[tensor.dtype]

    def rows(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        tensor = self._tensors[name]
        return tensor.data[start:end].view(_DTYPES[tensor.dtype])

    def _open_shards(self, folder: Path, index: Path) -> None:
        placed = shards(index)
        for shard in sorted(set(placed.values())):
            self._open(folder / shard)
        for name, shard in placed.items():
            if name not in self._tensors:
                raise MegakernelError(f"{index} places tensor {name} in {shard}, which does not hold it")

    def _open(self, path: Path) -> None:
        data = map_file(path)
        if len(data) < 8 or (length := int(data[:8].view("<u8")[0])) > min(len(data) - 8, _HEADER_LIMIT):
            raise damaged(path, "it is too short for the header of a safetensors file")
        ranges, dtypes = [], []
        for name, entry in _header(path, bytes(data[8 : 8 + length])).items():
            if name == "__metadata__":
                continue
            if name in self._tensors:
                raise MegakernelError(f"tensor {name} must not be in two files, {self._tensors[name].path} and {path}")
            self.shapes[name], dtype, (begin, end) = _entry(path, name, entry)
            ranges.append((8 + length + begin, 8 + length + end, name))
            dtypes.append(dtype)
        check_ranges(path, ranges, 8 + length, len(data))
        for (begin, end, name), dtype in zip(ranges, dtypes, strict=True):
            rows = math.prod(self.shapes[name][:-1] or self.shapes[name])
            self._tensors[name] = Tensor(path, dtype, data[begin:end].reshape(rows, -1))


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name appears twice")
        return table

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise MegakernelError(f"{path} is damaged or not a safetensors file: its header is not valid ({e})") from e
    if not isinstance(header, dict):
        raise MegakernelError(f"{path} is damaged or not a safetensors file: its header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], str, list[int]]:
    """Return a tensor's shape, type and byte range from its header entry. Raises MegakernelError if the range does not
    have the size that the shape and the type require."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values) and len(values) < 9

    if not (isinstance(entry, dict) and whole(entry.get("shape")) and whole(entry.get("data_offsets"))):
        raise damaged(path, f"tensor {name} has no valid shape or data_offsets")
    shape, offsets, dtype = tuple(entry["shape"]), entry["data_offsets"], entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _unsupported(path, name, dtype)
    size = math.prod(shape) * _DTYPES[dtype].itemsize
    if 0 in shape:
        raise MegakernelError(f"tensor {name} in {path} is empty: its shape is {list(shape)}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        told = f"tensor {name} of shape {list(shape)} and type {dtype} needs {size} bytes, not data_offsets {offsets}"
        raise damaged(path, told)
    return shape, dtype, offsets


def _unsupported(path: Path, name: str, dtype: Any) -> MegakernelError:
    return MegakernelError(
        f"tensor {name} in {path} has type {dtype!s:.60}, which is not supported: use one of {', '.join(_FLOATS)}"
    )


def open_folder(folder: Path, name: str) -> FileCheckpoint:
    """Open a Hugging Face model folder. `name` is the model's name in messages."""
    return checkpoint_of(read_hf_config(folder), SafetensorsFiles(folder), name or folder.name)


def checkpoint_of(config: ModelConfig, tensors: SafetensorsFiles, name: str, *, some: bool = False) -> FileCheckpoint:
    """Return a checkpoint called `name` of `tensors` with Hugging Face's names. With `some`, weights may be absent."""
    family = FAMILIES[config.family]
    tensors.use(family)
    expected = expected_shapes(safetensors_naming(config))
    for old, new in _PREFIXES:
        names = (name.removeprefix(old) for name in tensors.shapes if name.startswith(old) and name not in expected)
        if any(new + name in expected for name in names):
            tensors.rename(old, new)
            config = replace(config, tied=config.tied or not (some or _HEAD in tensors.shapes))
    if config.tied and _EMBED not in tensors.shapes and not some:
        tensors.rename(_HEAD, _EMBED)  # the package safetensors stores a shared matrix once, under its first name
    _check_tied(config, tensors)
    naming = safetensors_naming(config)
    files = split_experts(tensors, family.alternate)
    return FileCheckpoint(name, files, naming, left_out=tensors.left_out, some=some)


def safetensors_naming(config: ModelConfig) -> Naming:
    """The tensor names of a model in Hugging Face's format."""
    return Naming(config, "safetensors", ("rotary_emb.inv_freq",))


def _check_tied(config: ModelConfig, tensors: SafetensorsFiles) -> None:
    """Raise MegakernelError if the file's LM head differs from its embedding table, but the configuration says that
    they are the same matrix (tied). Inference engines disagree about which one to use."""
    if not config.tied or _HEAD not in tensors.shapes:
        return
    same = tensors.shapes[_HEAD] == tensors.shapes.get(_EMBED) and all(
        np.array_equal(tensors.rows(_HEAD, row, row + 4096), tensors.rows(_EMBED, row, row + 4096))
        for row in range(0, tensors.shapes[_HEAD][0], 4096)
    )
    if not same:
        raise MegakernelError(
            f"{tensors.where(_HEAD)}: {_HEAD} differs from {_EMBED}, but config.json says that they are equal (tied)"
        )
    del tensors.shapes[_HEAD]
