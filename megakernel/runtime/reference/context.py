"""What instructions access in the reference backend, including the layout of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...isa import Buffer, Dims, Dtype, to_f32
from ...isa.context import F32, Context
from ...isa.dims import KV_SCALE, KV_UNIT
from ...isa.dtypes import BLOCKS
from ...model.quantise import quantise


@dataclass(frozen=True)
class ReferenceContext(Context):
    """The data that one instruction can access. K and V are stored as `BufferSpec` says."""

    def read_cache(self, buffer: Buffer, sequence: int, head: int, positions: NDArray[Any]) -> F32:
        page, offset = self._places(sequence, positions)
        if not self.dims.quantised_kv:
            token = (slice(None), offset) if buffer is Buffer.K_CACHE else (offset,)
            return self.read(buffer, (page, head, *token))
        rows: NDArray[np.uint8] = self.buffer(buffer)[cache_bytes(self.dims, buffer, page, head, offset)]
        whole = Dtype.Q8_0.row_bytes(self.dims.head_dim)
        return to_f32(np.pad(rows, [(0, 0), (0, whole - self.dims.kv_row)]), Dtype.Q8_0)[:, : self.dims.head_dim]

    def write_cache(
        self, buffer: Buffer, sequences: NDArray[Any], positions: NDArray[Any], columns: NDArray[Any], values: F32
    ) -> None:
        d = self.dims
        page, offset = (each[:, None] for each in self._places(sequences, positions))
        head, element = np.divmod(columns, d.head_dim)
        if not d.quantised_kv:
            place = (element, offset) if buffer is Buffer.K_CACHE else (offset, element)
            self.write(buffer, (page, head, *place), values)
            return
        head = np.unique(head)
        blocks = quantise(values.reshape(-1, d.head_dim), Dtype.Q8_0)[:, : d.kv_row]
        index = cache_bytes(d, buffer, page, head, offset)
        self.buffer(buffer)[index] = blocks.reshape(len(values), len(head), d.kv_row)

    def _places(self, sequence: Any, position: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Return (page, offset in the page) of tokens. `sequence` is a number or has the shape of `position`."""
        return self.table.block_tables[sequence, position // self.dims.kv_page], position % self.dims.kv_page


def cache_bytes(d: Dims, buffer: Buffer, page: Any, head: Any, token: Any) -> tuple[Any, ...]:
    """An index that selects the bytes of quantised rows of K or V, in the order of their Q8_0 blocks. Its shape is
    [..., kv_row].

    `page`, `head` and `token`, the token's place in the page, must have the same shape, or broadcast to a common one.
    """
    page, head, token = (np.expand_dims(each, -1) for each in (page, head, token))
    # For each byte of a row: the number of its block, and its place in this block, which is a scale and then elements.
    block, byte = np.divmod(np.arange(d.kv_row), BLOCKS[Dtype.Q8_0].bytes)
    element, elements = byte - KV_SCALE, np.minimum(d.head_dim - block * KV_UNIT, KV_UNIT)
    # In a page, a block has the scales of all tokens, then the values of all tokens.
    scale = token * KV_SCALE + byte
    value = element * d.kv_page + token if buffer is Buffer.K_CACHE else token * elements + element
    at = np.where(byte < KV_SCALE, scale, d.kv_page * KV_SCALE + value)
    at += block * d.kv_page * BLOCKS[Dtype.Q8_0].bytes
    return page, head, *np.divmod(at, d.kv_page if buffer is Buffer.K_CACHE else d.kv_row)
