"""The one way of weights from files to backends: rows of a buffer, divided among ranks, in the types in which they are
kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dtype, Split, from_f32, to_f32
from ..isa.dtypes import BLOCKS
from .config import ModelConfig

# The number of elements that are converted at a time. The number is small, so that these elements stay in a cache and
# even a huge matrix needs little extra memory.
CHUNK = 1 << 15


class StoredRows(NamedTuple):
    """Neighbouring rows of a matrix that have one type."""

    dtype: Dtype
    rows: int


class WeightRows(NamedTuple):
    """Rows of one type: bytes [rows, bytes of a row] in the type's own layout. A row of a vector is one element."""

    dtype: Dtype
    data: NDArray[np.uint8]


def vector(values: NDArray[np.float32]) -> WeightRows:
    """The rows of a vector."""
    return WeightRows(Dtype.F32, values.reshape(-1, 1).view(np.uint8))


@dataclass(frozen=True)
class Storage:
    """The types in which a weight buffer is stored: parts for each layer, or one list if the buffer is not layered."""

    layers: tuple[tuple[StoredRows, ...], ...]

    def bits(self, inner: int) -> float:
        """The mean bits per weight, if a row has `inner` weights. The padding of a row's last block counts too."""
        parts = [part for layer in self.layers for part in layer]
        size = sum(part.rows * part.dtype.row_bytes(inner) for part in parts)
        return 8 * size / (inner * sum(part.rows for part in parts))


class Checkpoint(Protocol):
    """The weights of one model.

    `dtype` is the type in which its matrices are stored, or the nearest type in which backends compute. `storage` lists
    the matrices that a backend may keep in memory in the types of the file.
    """

    name: str
    config: ModelConfig
    dtype: Dtype
    storage: dict[Buffer, Storage]

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        """The rows of a weight buffer (of one layer if layered) that rank `split.rank` has, in the order that
        `megakernel.isa.buffers` gives, one matrix after another.

        A matrix in `storage` has the types listed there, any other matrix has the type `split.dtype`, and vectors are
        float32. The rows of q and k are in the interleaved RoPE order. The arrays may be read-only views of a file.
        `families.weights` must list the buffer. Raises MegakernelError if the file is damaged, or a rank's columns
        begin inside a quantised block.
        """


class Share(NamedTuple):
    """The rows or columns [first, first + size) of `whole`."""

    whole: int
    first: int
    size: int


def row_shares(buffer: Buffer, split: Split) -> list[Share]:
    """The rows that rank `split.rank` has of each tensor of a weight buffer, in order: for experts, of each expert."""
    match buffer:
        case Buffer.W_QKV | Buffer.B_QKV:
            size = split.model.head_dim
            if split.qkv_rows > split.qkv_cols:
                split = Split(split.model)
            kv = Share(split.model.kv_heads * size, split.first_kv_head * size, split.kv_cols)
            return [Share(split.model.heads * size, split.first_head * size, split.q_cols), kv, kv]
        case Buffer.W_GATE_UP | Buffer.B_GATE_UP:
            return [Share(split.model.ffn, split.first_ffn, split.rank_ffn)] * (2 * max(split.model.experts, 1))
        case Buffer.W_DOWN | Buffer.B_DOWN:
            return [_all(split.model.hidden)] * max(split.model.experts, 1)
        case Buffer.W_ROUTER | Buffer.B_ROUTER:
            return [_all(split.model.experts)]
        case Buffer.SINKS:
            return [Share(split.model.heads, split.first_head, split.rank_heads)]
        case Buffer.LM_HEAD:
            return [Share(split.model.vocab, split.first_vocab, split.rank_vocab)]
        case Buffer.EMBED:
            return [_all(split.model.vocab)]
        case Buffer.INV_FREQ:
            return [_all(split.model.head_dim)]
        case Buffer.QK_NORM:
            heads = (split.model.heads, split.model.kv_heads) if split.model.whole_norms else (1, 1)
            return [_all(count * split.model.head_dim) for count in heads]
    return [_all(split.model.hidden)]


def column_share(buffer: Buffer, split: Split) -> Share:
    """The columns that rank `split.rank` has of each row of a weight buffer."""
    match buffer:
        case Buffer.W_O:
            first = 0 if split.replicated_o else split.first_head * split.model.head_dim
            return Share(split.model.heads * split.model.head_dim, first, split.o_cols)
        case Buffer.W_DOWN:
            return Share(split.model.ffn, split.first_ffn, split.rank_ffn)
    return _all(split.model.hidden if BUFFERS[buffer].matrix else 1)


def _all(count: int) -> Share:
    return Share(count, 0, count)


def cut(whole: Sequence[WeightRows], buffer: Buffer, split: Split) -> list[WeightRows]:
    """The part of all rows of a weight buffer that rank `split.rank` has. The result consists of views."""
    out, base = [], 0
    for share in row_shares(buffer, split):
        begin = base + share.first
        for dtype, data in whole:
            part = data[max(begin, 0) : max(begin + share.size, 0)]
            out += [cut_columns(WeightRows(dtype, part), buffer, split)] if len(part) else []
            begin -= len(data)
        base += share.whole
    return out


def cut_columns(part: WeightRows, buffer: Buffer, split: Split) -> WeightRows:
    """The columns of some rows that rank `split.rank` has, as a view."""
    return WeightRows(part.dtype, part.data[:, column_bytes(part.dtype, buffer, split)])


def column_bytes(dtype: Dtype, buffer: Buffer, split: Split) -> slice:
    """The bytes of a row in the type `dtype` that a rank has. Raises MegakernelError if they begin inside a block."""
    _, first, count = column_share(buffer, split)
    if count and dtype.quantised and first % BLOCKS[dtype].weights:
        raise MegakernelError(
            f"cannot divide {buffer.name} in {dtype.name.lower()} among ranks: a part would begin inside a block of "
            f"{BLOCKS[dtype].weights} weights"
        )
    begin = dtype.row_bytes(first)
    return slice(begin, begin + dtype.row_bytes(count))


def rows_of(checkpoint: Checkpoint, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
    """`checkpoint.rows`, checked to be rows of a model with the sizes `split`. Raises MegakernelError."""
    rows = checkpoint.rows(buffer, layer, split)
    count, inner = sum(share.size for share in row_shares(buffer, split)), column_share(buffer, split).size
    if sum(len(data) for _, data in rows) != count or any(d.shape[1] != t.row_bytes(inner) for t, d in rows):
        raise MegakernelError(
            f"{checkpoint.name}: {buffer.name} of layer {layer} is not what the program needs: {count} rows of "
            f"{inner} weights"
        )
    return rows


def array_of(
    checkpoint: Checkpoint, buffer: Buffer, layer: int, split: Split, dtype: Dtype | None = None
) -> NDArray[np.generic]:
    """A rank's rows as a new array [rows, columns] of the float type `dtype`, by default the type in BUFFERS."""
    rows = rows_of(checkpoint, buffer, layer, split)
    shape = sum(len(part.data) for part in rows), column_share(buffer, split).size
    return floats(rows, shape, BUFFERS[buffer].resolve_dtype(split.model) if dtype is None else dtype)


def floats(parts: Iterable[WeightRows], shape: tuple[int, int], dtype: Dtype) -> NDArray[np.generic]:
    """The values of rows of any type as a new array [rows, columns] of the float type `dtype`."""
    out = np.empty(shape, dtype.numpy)
    if not out.size:
        return out
    begin, step = 0, max(1, CHUNK // shape[1])
    for kind, data in parts:
        for start in range(0, len(data), step):
            rows = data[start : start + step].view(kind.numpy)
            out[begin : begin + len(rows)] = (
                rows if kind is dtype else from_f32(to_f32(rows, kind)[:, : shape[1]], dtype)
            )
            begin += len(rows)
    return out


def converted(rows: Sequence[WeightRows], inner: int, dtype: Dtype) -> list[WeightRows]:
    """Rows of `inner` weights each, in the float type `dtype`. Parts that have this type are not copied."""
    return [
        part
        if part.dtype is dtype
        else WeightRows(dtype, floats([part], (len(part.data), inner), dtype).view(np.uint8))
        for part in rows
    ]
