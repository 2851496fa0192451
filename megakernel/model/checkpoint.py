"""Defines how backends get weights: each rank asks a checkpoint for its rows of a buffer, and gets them in the types in
which they are kept in memory."""

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

# The number of elements converted at a time, which is small so that they stay in a cache and need little memory.
CHUNK = 1 << 15


class StoredRows(NamedTuple):
    """The type of some neighbouring rows of a matrix, and their number."""

    dtype: Dtype
    rows: int


class WeightRows(NamedTuple):
    """Rows of weights of one type: `data` [rows, bytes per row] has the bytes that the type prescribes. A vector has
    one element per row."""

    dtype: Dtype
    data: NDArray[np.uint8]


def vector(values: NDArray[np.float32]) -> WeightRows:
    """The rows of a vector."""
    return WeightRows(Dtype.F32, values.reshape(-1, 1).view(np.uint8))


@dataclass(frozen=True)
class Storage:
    """The types in which a weight buffer is stored: for each layer, its runs of rows of one type. A buffer without
    layers counts as one layer."""

    layers: tuple[tuple[StoredRows, ...], ...]

    def bits(self, inner: int) -> float:
        """The mean bits per weight if a row has `inner` weights. Padding of a row's last block counts too."""
        parts = [part for layer in self.layers for part in layer]
        size = sum(part.rows * part.dtype.row_bytes(inner) for part in parts)
        return 8 * size / (inner * sum(part.rows for part in parts))


class Checkpoint(Protocol):
    """The weights of one model.

    `dtype` is the compute type that suits the weights best: float32 or bfloat16. `storage` lists the matrices that the
    file has in other types. A backend may keep these matrices in memory as they are.
    """

    name: str
    config: ModelConfig
    dtype: Dtype
    storage: dict[Buffer, Storage]

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        """Return those rows of a weight buffer (of one layer, if layered) that rank `split.rank` has. A buffer may have
        several matrices; `megakernel.isa.buffers` declares their order.

        The matrices in `storage` have the types listed there. All other matrices have the type `split.model.dtype`, and
        vectors are float32. In q and k, the two rows of each RoPE pair are adjacent. The arrays may be read-only views
        of a file. The model must use the buffer (see `families.weights`). Raises MegakernelError if the file is
        damaged, or if a rank's columns begin inside a quantised block.
        """


class Share(NamedTuple):
    """The rows or columns [first, first + size) out of `whole`."""

    whole: int
    first: int
    size: int


def row_shares(buffer: Buffer, split: Split) -> list[Share]:
    """Return which rows of a weight buffer rank `split.rank` has: one entry per matrix or vector, in the buffer's
    order. In a layer with experts, each expert's matrices have their own entries."""
    match buffer:
        case Buffer.W_QKV | Buffer.B_QKV:
            size = split.model.head_dim
            if split.qkv_rows > split.qkv_cols:
                split = Split(split.model)
            kv = Share(split.model.kv_heads * size, split.first_kv_head * size, split.kv_cols)
            return [Share(split.model.heads * size, split.first_head * size, split.q_cols), kv, kv]
        case Buffer.W_GATE_UP | Buffer.B_GATE_UP:
            return _of_experts([Share(split.model.ffn, split.first_ffn, split.rank_ffn)] * 2, split)
        case Buffer.W_DOWN | Buffer.B_DOWN:
            return _of_experts([_all(split.model.hidden)], split)
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
    """Return which columns rank `split.rank` has of each row of a weight buffer."""
    match buffer:
        case Buffer.W_O:
            first = 0 if split.replicated_o else split.first_head * split.model.head_dim
            return Share(split.model.heads * split.model.head_dim, first, split.o_cols)
        case Buffer.W_DOWN:
            return Share(split.model.ffn, split.first_ffn, split.rank_ffn)
    return _all(split.model.hidden if BUFFERS[buffer].matrix else 1)


def _all(count: int) -> Share:
    return Share(count, 0, count)


def _of_experts(shares: list[Share], split: Split) -> list[Share]:
    """Return the shares of all experts, each of which has the entries `shares`, or no rows if another rank has it."""
    own = range(split.first_expert, split.first_expert + split.rank_experts)
    none = [share._replace(size=0) for share in shares]
    return [share for e in range(split.model.experts) for share in (shares if e in own else none)] or shares


def cut(whole: Sequence[WeightRows], buffer: Buffer, split: Split) -> list[WeightRows]:
    """Return the part of a weight buffer that rank `split.rank` has, as views. `whole` has all rows of the buffer."""
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
    """Return the columns that rank `split.rank` has of the rows `part`, as a view."""
    return WeightRows(part.dtype, part.data[:, column_bytes(part.dtype, buffer, split)])


def column_bytes(dtype: Dtype, buffer: Buffer, split: Split) -> slice:
    """Return the bytes of a row that a rank has. Raises MegakernelError if they begin inside a quantised block."""
    _, first, count = column_share(buffer, split)
    if count and dtype.quantised and first % BLOCKS[dtype].weights:
        raise MegakernelError(
            f"cannot divide {buffer.name} in {dtype.name.lower()} among ranks: a part would begin inside a block of "
            f"{BLOCKS[dtype].weights} weights"
        )
    begin = dtype.row_bytes(first)
    return slice(begin, begin + dtype.row_bytes(count))


def rows_of(checkpoint: Checkpoint, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
    """Return `checkpoint.rows(...)`. Raises MegakernelError if they do not have the sizes in `split`."""
    rows = checkpoint.rows(buffer, layer, split)
    count, inner = sum(share.size for share in row_shares(buffer, split)), column_share(buffer, split).size
    if sum(len(data) for _, data in rows) != count or any(d.shape[1] != t.row_bytes(inner) for t, d in rows):
        raise MegakernelError(
            f"{checkpoint.name}: {buffer.name} of layer {layer} does not have the {count} rows of {inner} weights that "
            "the program needs"
        )
    return rows


def array_of(
    checkpoint: Checkpoint, buffer: Buffer, layer: int, split: Split, dtype: Dtype | None = None
) -> NDArray[np.generic]:
    """Return the weights of a rank as a new array [rows, columns] of the float type `dtype`. By default, this is the
    type that the buffer is declared with."""
    rows = rows_of(checkpoint, buffer, layer, split)
    shape = sum(len(part.data) for part in rows), column_share(buffer, split).size
    return floats(rows, shape, BUFFERS[buffer].resolve_dtype(split.model) if dtype is None else dtype)


def floats(parts: Iterable[WeightRows], shape: tuple[int, int], dtype: Dtype) -> NDArray[np.generic]:
    """Return the weights in `parts`, of any types, as a new array of this shape and of the float type `dtype`."""
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
    """Return rows of `inner` weights in the float type `dtype`. Parts that have this type are not copied."""
    return [
        part
        if part.dtype is dtype
        else WeightRows(dtype, floats([part], (len(part.data), inner), dtype).view(np.uint8))
        for part in rows
    ]
