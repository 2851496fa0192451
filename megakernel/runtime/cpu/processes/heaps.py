"""The symmetric heap: the buffers to which other ranks write. A buffer lies at the same offset in each rank's shared
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from ....errors import MegakernelError
from ....isa import BUFFERS, Buffer, Dims
from ..audit import Target
from .channel import Place
from .shared_memory import Mapping, aligned

# The buffers that instructions of other ranks write; the host may also read and write them. All others are private.
SHARED = (
    Buffer.H,
    Buffer.ATTN,
    Buffer.Y,
    Buffer.LOGITS,
    Buffer.HISTORY,
    Buffer.TOKENS_OUT,
    Buffer.LOGPROBS_OUT,
    Buffer.REDUCE,
)


class Heaps:
    """The heaps of all ranks, mapped into one process.

    A heap is a list of shared files. If a program needs larger buffers, these buffers move to a new
    file, and a file without buffers is freed.
    """

    def __init__(self, dims: Dims) -> None:
        self._dims = dims
        self._elements = dict.fromkeys(SHARED, 0)
        self._places: dict[Buffer, tuple[list[Mapping], int, tuple[int, ...]]] = {}

    def plan(self, dims: Dims) -> tuple[Place, int] | None:
        """Return new places for the buffers that must grow for programs of `dims`, and the bytes that these buffers
        take on each rank. Return None if all buffers are large enough.
        """
        # Shards are largest on rank 0, and a buffer gets the same size on all ranks.
        shapes = {b: BUFFERS[b].shape(dims, 0) for b in SHARED}
        moved = {b: list(shape) for b, shape in shapes.items() if math.prod(shape) > self._elements[b]}
        sizes = (aligned(math.prod(moved[b]) * BUFFERS[b].resolve_dtype(dims).itemsize) for b in moved)
        *offsets, size = accumulate(sizes, initial=0)
        return (Place(list(map(int, moved)), offsets, list(moved.values())), size) if moved else None

    def place(self, message: Place, files: Sequence[Mapping]) -> list[Buffer]:
        """Move buffers to the places that `message` gives in `files`, which has one new file per rank.
        Returns the buffers that have moved.
        """
        moved = [Buffer(number) for number in message.buffers]
        for buffer, offset, shape in zip(moved, message.offsets, message.shapes, strict=True):
            self._places[buffer] = list(files), offset, tuple(shape)
            self._elements[buffer] = math.prod(shape)
        return moved

    def array(self, buffer: Buffer, rank: int) -> NDArray[Any]:
        files, offset, shape = self._places[buffer]
        return files[rank].array(offset, BUFFERS[buffer].resolve_dtype(self._dims).numpy, shape)

    def locate(self, address: int, size: int) -> Target:
        """Return the buffer, the rank and the elements to which the `size` bytes at `address` in a heap belong."""
        for buffer in self._places:
            itemsize = BUFFERS[buffer].resolve_dtype(self._dims).itemsize
            for rank in range(self._dims.tp):
                array = self.array(buffer, rank)
                offset = address - array.ctypes.data
                if offset >= 0 and offset + size <= array.nbytes:
                    return Target(buffer, rank, offset // itemsize, size // itemsize)
        raise MegakernelError(f"{size} bytes were stored to another rank's memory outside all buffers")

    def file(self, buffer: Buffer, rank: int) -> Mapping:
        return self._places[buffer][0][rank]
