"""The data that an instruction can access while the reference interpreter runs it in NumPy.

All values are float32; a result is rounded to its buffer's type once, where it is stored. BLAS libraries add in
different orders. Dot products are therefore added in float64, where the order hardly ever changes the result in
float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .buffers import Buffer, given
from .dims import Dims
from .dtypes import Dtype, from_f32, to_f32
from .phases import Phase
from .step import StepTable

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Context(ABC):
    """The data that one instruction can access: its phase, its rank's sizes and step table, and its
    layer's part of buffers.

    `buffer(buffer, ahead=0)` returns the rank's own copy for the layer that is `ahead` layers
    later, or for the last layer if there are fewer layers. Other ranks' copies can only be written,
    by `send(buffer, rank, index, values)`, whose values have the buffer's own type.
    """

    phase: Phase
    dims: Dims
    table: StepTable
    buffer: Callable[..., NDArray[Any]]
    send: Callable[[Buffer, int, Any, NDArray[Any]], None]

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

    def biased(self, values: F32, index: Any) -> F32:
        """`values` plus the phase's bias, if it has one."""
        return values if self.phase.bias is None else values + self.read(self.phase.bias, index)

    def reduce_rows(self, rank: int, row: int, rows: int) -> slice:
        """The rows of REDUCE that hold the partial sums of `rank` for the token rows [row, row + rows),
        which must lie in one row block. These rows of REDUCE are on the rank that adds the sums up.
        """
        start = self.dims.reduce_row(rank, row)
        return slice(start, start + rows)

    def write(self, buffer: Buffer, index: Any, values: Any) -> None:
        """Round values to the buffer's own type and store them."""
        self.store(buffer, (self.dims.rank,), index, values)

    def store(self, buffer: Buffer, ranks: Iterable[int], index: Any, values: Any) -> None:
        """Like `write`, but into the copies that `ranks` have of the buffer."""
        own = self.buffer(buffer)
        stored = from_f32(values, Dtype.BF16) if own.dtype == np.uint16 else np.asarray(values, own.dtype)
        for rank in ranks:
            if rank == self.dims.rank:
                own[index] = stored
            else:
                self.send(buffer, rank, index, stored)

    @abstractmethod
    def read_cache(self, buffer: Buffer, sequence: int, head: int, positions: NDArray[Any]) -> F32:
        """Return K or V of one KV head and of some tokens of a sequence: [tokens, head_dim]."""

    @abstractmethod
    def write_cache(
        self, buffer: Buffer, sequences: NDArray[Any], positions: NDArray[Any], columns: NDArray[Any], values: F32
    ) -> None:
        """Store K or V, [tokens, columns]. `columns` are elements of a token's row, which has all KV heads of the rank.
        They must be those of whole heads if the cache is quantised.
        """


def product(a: F32, b: F32) -> F32:
    """a @ b, added in float64 and rounded once.

    The order of additions depends on the BLAS library and on the other rows in the batch.
    A different order changes fewer than one in ten million of the rounded numbers.
    """
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
