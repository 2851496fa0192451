"""The data that an instruction can access while the reference interpreter, written in NumPy, executes the instruction.

All values are float32. A result is rounded to its buffer's type once, when it is stored. Dot products are added in
float64, because BLAS libraries add in different orders. In float64, the order hardly ever changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buffers import Buffer, given
from .dims import KV_SCALE, KV_UNIT, Dims
from .dtypes import BLOCKS, Dtype, from_f32, to_f32
from .integers import Codes, multiply, rounded
from .phases import Phase
from .step import StepTable

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Context:
    """The data that one instruction can access: its phase, the sizes and the step table as its rank sees them, and the
    buffers of its layer. `layer` is the layer's number: in the prologue that of the first layer, in the epilogue that
    of the last.

    `buffer(buffer, ahead=0)` returns the rank's own copy of a buffer for the layer that is `ahead` layers later. If
    there is no such layer, the last layer counts. `send(buffer, rank, index, values)` writes to another rank's copy;
    reading it is impossible. `values` must have the buffer's type.

    `codes(buffer, ahead=0)` returns the weights that are multiplied as integers, as a list of groups of rows. Each
    entry has the number of the group's first row, and the integers.
    """

    phase: Phase
    dims: Dims
    table: StepTable
    buffer: Callable[..., NDArray[Any]]
    send: Callable[[Buffer, int, Any, NDArray[Any]], None]
    codes: Callable[..., list[tuple[int, Codes]]]
    layer: int

    @property
    def inputs(self) -> Buffer:
        return given(self.phase.inputs)

    @property
    def output(self) -> Buffer:
        return given(self.phase.output)

    def read(self, buffer: Buffer, index: Any = ...) -> F32:
        values: NDArray[Any] = self.buffer(buffer)[index]
        return to_f32(values)

    def weights(self, index: Any = ...) -> F32:
        """The phase's weights, which belong to the layer that is `phase.ahead` layers later."""
        values: NDArray[Any] = self.buffer(given(self.phase.weights), ahead=self.phase.ahead)[index]
        return to_f32(values)

    def products(self, a: F32, matrix: int, col: int, cols: int) -> F32:
        """Return `a` times columns [col, col + cols) of the phase's matrix number `matrix`: [rows, cols]."""
        weights: NDArray[Any] = self.buffer(given(self.phase.weights), ahead=self.phase.ahead)
        weights = weights.reshape(-1, *weights.shape[-2:])
        out, in_floats = np.empty((len(a), cols), np.float32), np.ones(cols, bool)
        start = matrix * weights.shape[1] + col
        for first, codes in self.codes(given(self.phase.weights), ahead=self.phase.ahead):
            low, end = max(first, start), min(first + len(codes.values), start + cols)
            if low < end:
                own = slice(low - first, end - first)
                offset = None if codes.offset is None else codes.offset[own]
                chosen = Codes(codes.values[own], codes.scale[own], offset)
                columns = slice(low - start, end - start)
                out[:, columns], in_floats[columns] = multiply(rounded(a), chosen), False
        if in_floats.any():
            out[:, in_floats] = product(a, to_f32(weights[matrix, col : col + cols][in_floats]).T)
        return out

    def biased(self, values: F32, index: Any) -> F32:
        """`values` plus the phase's bias, if it has one."""
        return values if self.phase.bias is None else values + self.read(self.phase.bias, index)

    def reduce_rows(self, rank: int, row: int, rows: int) -> slice:
        """Return the rows of REDUCE where rank `rank` stores its partial sums for token rows [row, row + rows)."""
        start = self.dims.reduce_row(rank, row)
        return slice(start, start + rows)

    def write(self, buffer: Buffer, index: Any, values: Any) -> None:
        """Round values to the buffer's own type and store them."""
        self.store(buffer, (self.dims.split.rank,), index, values)

    def store(self, buffer: Buffer, ranks: Iterable[int], index: Any, values: Any) -> None:
        """Like `write`, but into the copies that `ranks` have of the buffer."""
        own = self.buffer(buffer)
        stored = from_f32(values, Dtype.BF16) if own.dtype == np.uint16 else np.asarray(values, own.dtype)
        for rank in ranks:
            if rank == self.dims.split.rank:
                own[index] = stored
            else:
                self.send(buffer, rank, index, stored)

    def read_cache(self, buffer: Buffer, sequence: int, head: int, positions: NDArray[Any]) -> F32:
        """Return K or V of one KV head and of some tokens of a sequence: [tokens, head_dim]."""
        d, (page, offset) = self.dims, self._places(sequence, positions)
        if not d.model.quantised_kv:
            token = (slice(None), offset) if buffer is Buffer.K_CACHE else (offset,)
            return self.read(buffer, (page, head, *token))
        return to_f32(self.cache_blocks(buffer, sequence, head, positions), Dtype.Q8_0)[:, : d.model.head_dim]

    def cache_blocks(self, buffer: Buffer, sequence: int, head: int, positions: NDArray[Any]) -> NDArray[np.uint8]:
        """Like `read_cache` for quantised K or V, but return whole Q8_0 blocks, padded with zeros: [tokens, bytes]."""
        d, (page, offset) = self.dims, self._places(sequence, positions)
        rows: NDArray[np.uint8] = self.buffer(buffer)[cache_bytes(d, buffer, page, head, offset)]
        whole = Dtype.Q8_0.row_bytes(d.model.head_dim)
        return np.pad(rows, [(0, 0), (0, whole - d.model.kv_row)])

    def write_cache(
        self, buffer: Buffer, sequences: NDArray[Any], positions: NDArray[Any], columns: NDArray[Any], values: F32
    ) -> None:
        """Store `values` [tokens, columns] as K or V. `columns` are indices of elements, counted over all KV heads of
        the rank. If the cache is quantised, all elements of a head must be stored together."""
        d, (page, offset) = self.dims, (each[:, None] for each in self._places(sequences, positions))
        head, element = np.divmod(columns, d.model.head_dim)
        if not d.model.quantised_kv:
            place = (element, offset) if buffer is Buffer.K_CACHE else (offset, element)
            self.write(buffer, (page, head, *place), values)
            return
        head = np.unique(head)
        rows = np.pad(values.reshape(-1, d.model.head_dim), [(0, 0), (0, -d.model.head_dim % KV_UNIT)])
        blocks = from_f32(rows, Dtype.Q8_0)[:, : d.model.kv_row].reshape(len(values), len(head), d.model.kv_row)
        self.buffer(buffer)[cache_bytes(d, buffer, page, head, offset)] = blocks

    def _places(self, sequence: Any, position: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Return each token's KV page and its offset there. `sequence` is a number or has `position`'s shape."""
        page, offset = np.divmod(position, self.dims.bucket.kv_page)
        return self.table.block_tables[sequence, page], offset


def cache_bytes(d: Dims, buffer: Buffer, page: Any, head: Any, token: Any) -> tuple[Any, ...]:
    """Return where a token's quantised K or V is stored in the cache. The result is a NumPy index of shape [...,
    kv_row]: one position per byte, in the order of Q8_0 blocks.

    `token` is the token's index in its KV page. The shapes of `page`, `head` and `token` must broadcast.
    """
    page, head, token = (np.expand_dims(each, -1) for each in (page, head, token))
    # For each byte of a row: the number of its Q8_0 block, and its offset in the block (a scale, then elements).
    block, byte = np.divmod(np.arange(d.model.kv_row), BLOCKS[Dtype.Q8_0].bytes)
    element, elements = byte - KV_SCALE, np.minimum(d.model.head_dim - block * KV_UNIT, KV_UNIT)
    # A KV page has, for each KV_UNIT elements of a head, the scales of all tokens and then their values. V stores all
    # values of one token, then those of the next. K stores four values of each token, then the next four of each token.
    scale = token * KV_SCALE + byte
    word = element // 4 * 4
    key = word * d.bucket.kv_page + token * np.minimum(elements - word, 4) + element % 4
    value = key if buffer is Buffer.K_CACHE else token * elements + element
    at = np.where(byte < KV_SCALE, scale, d.bucket.kv_page * KV_SCALE + value)
    at += block * d.bucket.kv_page * BLOCKS[Dtype.Q8_0].bytes
    return page, head, *np.divmod(at, d.bucket.kv_page if buffer is Buffer.K_CACHE else d.model.kv_row)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Return each row of `x`, divided by its root mean square and multiplied by `weight`."""
    scale: F32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / scale * weight


def capped(x: F32, cap: float) -> F32:
    """Return cap * tanh(x / cap), which is between -cap and cap. If `cap` is 0, return `x`."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def product(a: F32, b: F32) -> F32:
    """Return a @ b, added in float64 and rounded once, so that BLAS's order of additions hardly changes a number."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
