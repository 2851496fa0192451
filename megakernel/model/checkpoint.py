"""The interface between weight files and backends: one tensor at a time, in the layout of the instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import KV_BLOCK, Buffer, Dims, Dtype, to_f32
from .config import ModelConfig


class Part(NamedTuple):
    """Neighbouring rows of a matrix that have one type."""

    dtype: Dtype
    rows: int


class Rows(NamedTuple):
    """Rows of a matrix as the file stores them: an array [rows, bytes of a row], in the type's own
    layout.
    """

    dtype: Dtype
    data: NDArray[np.uint8]


def widened(parts: Sequence[Rows], inner: int) -> NDArray[np.float32]:
    """The float32 values of stored rows with `inner` weights each."""
    values = [to_f32(data.view(dtype.numpy), dtype)[:, :inner] for dtype, data in parts]
    return np.concatenate(values) if values else np.zeros((0, inner), np.float32)


@dataclass(frozen=True)
class Storage:
    """The types in which the rows of a weight buffer are stored: a list of parts for each layer, or
    one list if the buffer is not layered.
    """

    layers: tuple[tuple[Part, ...], ...]

    def bits(self, inner: int) -> float:
        """The mean number of bits per weight over all rows, if a row has `inner` weights. The
        padding of each row's last block counts too.
        """
        parts = [part for layer in self.layers for part in layer]
        size = sum(part.rows * part.dtype.row_bytes(inner) for part in parts)
        return 8 * size / (inner * sum(part.rows for part in parts))


class Checkpoint(Protocol):
    """The weights of one model.

    `dtype` is the type in which its matrices are stored, or the nearest type in which backends
    compute. `storage` lists the matrices that a backend may keep in memory in the types of the
    file. For these matrices, `stored` returns rows in those types, and `load` converts them like
    all other weights.
    """

    name: str
    config: ModelConfig
    dtype: Dtype
    storage: dict[Buffer, Storage]

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        """One weight buffer (of one layer if layered) in the shape that `megakernel.isa.buffers` gives.

        If BUFFERS declares a type for the buffer, the result has this type, otherwise `dtype`;
        bfloat16 is returned as uint16. The rows of q and k are in the interleaved RoPE order.
        `buffer` must be one that `families.weights` lists.
        """

    def stored(self, buffer: Buffer, layer: int) -> Sequence[Rows]:
        """The rows of a weight buffer (of one layer if layered), in order, one matrix after
        another. `storage` must list the buffer.
        """


def weight_dims(config: ModelConfig, dtype: Dtype) -> Dims:
    """Dims from which the shapes of a model's weight buffers can be computed. Sizes on which these
    shapes do not depend are 1.
    """
    return Dims(
        vocab=config.vocab,
        hidden=config.hidden,
        ffn=config.ffn,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        dtype=int(dtype),
        kv_block=KV_BLOCK,
        kv_page=1,
        row_block=1,
        tokens=1,
        logit_rows=1,
        max_seqs=1,
        max_context=1,
        items=1,
        attention_slots=1,
        partials=1,
        bias_entries=1,
    )
