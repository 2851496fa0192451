"""The types in which matrices are kept in memory, which may differ from the compute type."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dims, Dtype
from .checkpoint import Checkpoint, Part, Rows, Storage, column_bytes, column_share, converted, weight_dims
from .config import ModelConfig
from .families import weights
from .quantise import quantise

# The values of `--weights` besides `auto`, which keeps the checkpoint's own types.
WEIGHT_TYPES = {kind.name.lower(): kind for kind in Dtype if kind is not Dtype.I32}


# The values of `--kv-cache-dtype` besides `auto`, which is the compute type.
KV_TYPES = {Dtype.Q8_0.name.lower(): Dtype.Q8_0}


def quantised_kv(name: str) -> bool:
    """Whether `--kv-cache-dtype name` quantises K and V. Raises MegakernelError."""
    if name != "auto" and name not in KV_TYPES:
        raise MegakernelError(f"cannot store K and V in {name!r}: choose from auto, {', '.join(KV_TYPES)}")
    return name in KV_TYPES


def stored_as(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """`checkpoint` with its matrices stored in the type `name`; `auto` keeps them as they are. Raises
    MegakernelError.
    """
    return checkpoint if name == "auto" else _Stored(checkpoint, _weight_type(name))


def storage_of(checkpoint: Checkpoint | None, config: ModelConfig, name: str) -> dict[Buffer, Storage]:
    """The matrices that are not kept in memory in the compute type with `--weights NAME`, and their
    types. Without a checkpoint (None), `auto` means the compute type.

    Raises MegakernelError.
    """
    if name != "auto":
        return _all_in(config, _weight_type(name))
    return {} if checkpoint is None else checkpoint.storage


def bits_of(config: ModelConfig, storage: Mapping[Buffer, Storage]) -> dict[Buffer, float]:
    """The mean bits per weight of each buffer in `storage`, in the form that `compile_program` takes."""
    dims = weight_dims(config, Dtype.F32)
    return {buffer: stored.bits(BUFFERS[buffer].shape(dims, 0)[-1]) for buffer, stored in storage.items()}


def _weight_type(name: str) -> Dtype:
    if name not in WEIGHT_TYPES:
        raise MegakernelError(f"cannot store weights in {name!r}: choose from auto, {', '.join(WEIGHT_TYPES)}")
    return WEIGHT_TYPES[name]


def _all_in(config: ModelConfig, kind: Dtype) -> dict[Buffer, Storage]:
    """The `storage` of a checkpoint that stores all matrices of a model in one type."""
    dims = weight_dims(config, Dtype.F32)
    shapes = {b: BUFFERS[b].shape(dims, 0) for b in weights(config) if BUFFERS[b].matrix}
    return {
        buffer: Storage(((Part(kind, math.prod(shape[:-1])),),) * (dims.layers if BUFFERS[buffer].layered else 1))
        for buffer, shape in shapes.items()
    }


def bytes_by_type(config: ModelConfig, dtype: Dtype, storage: Mapping[Buffer, Storage]) -> dict[str, int]:
    """The bytes that all matrices of a model take in memory, by the name of their type. Tied
    embeddings count once.

    `storage` lists the matrices that are not in the compute type `dtype`.
    """
    dims = weight_dims(config, dtype)
    out: Counter[str] = Counter()
    for buffer in weights(config):
        if not BUFFERS[buffer].matrix or (buffer is Buffer.LM_HEAD and config.tied):
            continue
        *rows, inner = BUFFERS[buffer].shape(dims, 0)
        whole = Storage(((Part(dtype, math.prod(rows)),),) * (dims.layers if BUFFERS[buffer].layered else 1))
        for kind, count in (part for layer in storage.get(buffer, whole).layers for part in layer):
            out[kind.name.lower()] += count * kind.row_bytes(inner)
    return dict(out.most_common())


class _Stored:
    """The checkpoint that `stored_as` returns. It does not convert rows that already have the
    requested type.
    """

    def __init__(self, whole: Checkpoint, dtype: Dtype) -> None:
        self.name, self.config, self.dtype = whole.name, whole.config, whole.dtype
        self.storage = _all_in(whole.config, dtype)
        self._whole, self._kind = whole, dtype

    def rows(self, buffer: Buffer, layer: int, split: Dims) -> list[Rows]:
        exact = replace(split, dtype=int(Dtype.F32))
        rows = self._whole.rows(buffer, layer, exact)
        if buffer not in self.storage or {part.dtype for part in rows} == {self._kind}:
            return rows
        column_bytes(self._kind, buffer, split)  # refuses columns that begin inside a block
        inner = column_share(buffer, split).size
        if not self._kind.quantised:
            return converted(rows, inner, self._kind)
        return [
            Rows(self._kind, quantise(part.data.view(np.float32), self._kind))
            for part in converted(rows, inner, Dtype.F32)
        ]
