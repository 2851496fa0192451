"""The types in which matrices are kept in memory, which may differ from the compute type."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dtype, from_f32
from .checkpoint import Checkpoint, Part, Rows, Storage, weight_dims
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

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        return self._whole.load(buffer, layer, dtype)

    def stored(self, buffer: Buffer, layer: int) -> list[Rows]:
        if buffer in self._whole.storage:
            rows = self._whole.stored(buffer, layer)
            if {part.dtype for part in rows} == {self._kind}:
                return list(rows)
        values = self._whole.load(buffer, layer, Dtype.F32).astype(np.float32, copy=False)
        flat = values.reshape(-1, values.shape[-1])
        data = quantise(flat, self._kind) if self._kind.quantised else from_f32(flat, self._kind).view(np.uint8)
        return [Rows(self._kind, data)]
