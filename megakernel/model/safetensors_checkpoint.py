"""Reads the weights in Hugging Face folders: `model.safetensors`, or several files with `model.safetensors.index.json`.

A file has an 8-byte little-endian header length, a JSON header with the dtype, shape and data_offsets of each tensor,
and the data (huggingface.co/docs/safetensors). The package safetensors is not used, because it cannot return bfloat16
as NumPy arrays.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MegakernelError
from ..isa import Dtype
from .config import ModelConfig
from .families import FAMILIES
from .file_checkpoint import FileCheckpoint, Naming, Tensors, check_ranges, damaged, expected_shapes, map_file, stored
from .folder import INDICES, shards
from .split_experts import split_experts

_DTYPES: dict[str, Dtype | None] = {kind.name: kind for kind in (Dtype.F32, Dtype.F16, Dtype.BF16)}
_DTYPES["U8"] = None  # the tensor has quantised weights (split_experts.py)
_HEADER_LIMIT = 100_000_000  # the format's limit on the length of a header, in bytes
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
# Prefixes of tensor names, each with the usual prefix that replaces it. Embedding models, which have no LM head, have
# no prefix. Models that also see images have one of the other two, written by older or newer software.
_PREFIXES = (("", "model."), ("language_model.", ""), ("model.language_model.", "model."))
_OF_IMAGES = tuple(
    f"{outer}{part}." for outer in ("", "model.") for part in ("multi_modal_projector", "vision_tower", "visual")
)


def read_folder(folder: Path) -> Tensors:
    """Return the tensors of all safetensors files of a folder. Headers are checked, and files mapped into memory."""
    single, index = (folder / name for name in INDICES)
    if single.exists():
        return _read_file(single)
    if not index.exists():
        raise MegakernelError(f"{folder} holds neither {single.name} nor {index.name}, and other files are not read")
    placed, tensors = shards(index), Tensors()
    for shard in sorted(set(placed.values())):
        more = _read_file(folder / shard)
        for name in sorted(tensors.keys() & more.keys()):
            paths = f"{tensors[name].path} and {more[name].path}"
            raise MegakernelError(f"tensor {name} must not be in two files, {paths}")
        tensors |= more
    for name, shard in placed.items():
        if name not in tensors:
            raise MegakernelError(f"{index} places tensor {name} in {shard}, which does not hold it")
    return tensors


def _read_file(path: Path) -> Tensors:
    data = map_file(path)
    if len(data) < 8 or (length := int(data[:8].view("<u8")[0])) > min(len(data) - 8, _HEADER_LIMIT):
        raise damaged(path, "it has no complete header of a safetensors file")
    header, start = _header(path, bytes(data[8 : 8 + length])), 8 + length
    entries = {name: _entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    ranges = [(start + begin, start + end, name) for name, (_, _, (begin, end)) in entries.items()]
    check_ranges(path, ranges, start, len(data))
    return {name: stored(path, *entries[name][:2], data[begin:end]) for begin, end, name in ranges}


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


def _entry(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], Dtype | None, list[int]]:
    """Return a tensor's shape, type and byte range from its header entry. Raises MegakernelError if the range does not
    have the size that the shape and the type require."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values) and len(values) < 9

    if not (isinstance(entry, dict) and whole(entry.get("shape")) and whole(entry.get("data_offsets"))):
        raise damaged(path, f"tensor {name} has no valid shape or data_offsets")
    shape, offsets, dtype = tuple(entry["shape"]), entry["data_offsets"], entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise MegakernelError(
            f"tensor {name} in {path} has type {dtype!s:.60}, which is not supported: use one of F32, F16, BF16"
        )
    kind = _DTYPES[dtype]
    size = math.prod(shape) * (kind.itemsize if kind is not None else 1)
    if 0 in shape:
        raise MegakernelError(f"tensor {name} in {path} is empty: its shape is {list(shape)}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        told = f"tensor {name} of shape {list(shape)} and type {dtype} needs {size} bytes, not data_offsets {offsets}"
        raise damaged(path, told)
    return shape, kind, offsets


def checkpoint_of(config: ModelConfig, given: Tensors, name: str, *, some: bool = False) -> FileCheckpoint:
    """Return a checkpoint called `name` of tensors with Hugging Face's names. Tensors that only images need are left
    out, and all others get the family's usual names. With `some`, weights may be absent."""
    family = FAMILIES[config.family]
    tensors = {name: tensor for name, tensor in given.items() if not name.startswith(_OF_IMAGES)}
    left_out = len(given) - len(tensors)
    for part, usual in family.renames.items():
        tensors = {name.replace(part, usual): tensor for name, tensor in tensors.items()}
    expected = expected_shapes(Naming(config, "safetensors"))
    for old, new in _PREFIXES:
        names = (name.removeprefix(old) for name in tensors if name.startswith(old) and name not in expected)
        if any(new + name in expected for name in names):
            tensors = _renamed(tensors, old, new)
            config = replace(config, tied=config.tied or not (some or _HEAD in tensors))
    if config.tied and _EMBED not in tensors and not some:
        # The package safetensors stores a shared matrix once, under its first name.
        tensors = _renamed(tensors, _HEAD, _EMBED)
    if config.tied:
        _remove_tied(tensors)
    naming = Naming(config, "safetensors")
    return FileCheckpoint(name, split_experts(tensors, family.alternate), naming, left_out=left_out, some=some)


def _renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    """Replace the prefix `old` of names by `new`."""
    return {new + n.removeprefix(old) if n.startswith(old) else n: tensor for n, tensor in tensors.items()}


def _remove_tied(tensors: Tensors) -> None:
    """Remove the LM head. Raise MegakernelError if it differs from the embedding table, but the configuration says that
    they are the same matrix (tied). Inference engines disagree about which one to use."""
    head, embed = tensors.pop(_HEAD, None), tensors.get(_EMBED)
    if head is None or (
        embed is not None
        and head.shape == embed.shape
        and all(
            np.array_equal(head.rows(row, row + 4096), embed.rows(row, row + 4096))
            for row in range(0, head.shape[0], 4096)
        )
    ):
        return
    raise MegakernelError(
        f"{head.path}: {_HEAD} differs from {_EMBED}, but config.json says that they are equal (tied)"
    )
