"""Defines how backends get weights: each rank asks a checkpoint for its rows of a buffer. The rows come in the types in
which backends keep them in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, Dtype, Split, column_share, from_f32, row_shares, to_f32
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
    """Return `values` as rows of a float32 vector, one element per row."""
    return WeightRows(Dtype.F32, values.reshape(-1, 1).view(np.uint8))


@dataclass(frozen=True)
class Storage:
    """The types in which a weight buffer is stored. For each layer, `layers` lists successive ranges of rows with one
    type each. A buffer without layers counts as one layer."""

    layers: tuple[tuple[StoredRows, ...], ...]

    def bits(self, inner: int) -> float:
        """Return the mean bits per weight, with padding, of rows that have `inner` weights."""
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
    """Return a view of the weights in `part`, with only the columns that rank `split.rank` has."""
    return WeightRows(part.dtype, part.data[:, column_bytes(part.dtype, buffer, split)])


def column_bytes(dtype: Dtype, buffer: Buffer, split: Split) -> slice:
    """Return which bytes of a row a rank has. Raises MegakernelError if they begin inside a quantised block."""
    _, first, count = column_share(buffer, split)
    if count and dtype.quantised and first % BLOCKS[dtype].weights:
        raise MegakernelError(
            f"cannot divide {buffer.name} in {dtype.name.lower()} among ranks: a part would begin inside a block of "
            f"{BLOCKS[dtype].weights} weights; lower --tp"
        )
    begin = dtype.row_bytes(first)
    return slice(begin, begin + dtype.row_bytes(count))


def rows_of(checkpoint: Checkpoint, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
    """Return `checkpoint.rows(...)`. Raises MegakernelError if these rows do not have the sizes in `split`."""
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
    """Return the weights of a buffer that rank `split.rank` has, as a new array [rows, columns] of the float type
    `dtype`. The default is the type with which the buffer is declared."""
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
    """Return rows of `inner` weights in the float type `dtype`. Rows that have this type already are not copied."""
    return [
        part
        if part.dtype is dtype
        else WeightRows(dtype, floats([part], (len(part.data), inner), dtype).view(np.uint8))
        for part in rows
    ]
