"""The symmetric heap: buffers that other ranks write, at the same offset of each rank's shared memory."""

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

# What instructions store at other ranks, and the host reads or writes there. All else is private to its process.
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
    """All ranks' heaps as one process sees them: its own, and windows to the others'.

    A heap is a row of shared files: a program with larger buffers than any before adds a file with a new place for
    those, and their old places are given up.
    """

    def __init__(self, dims: Dims) -> None:
        self._dims = dims
        self._elements = dict.fromkeys(SHARED, 0)
        self._places: dict[Buffer, tuple[list[Mapping], int, tuple[int, ...]]] = {}

    def plan(self, dims: Dims) -> tuple[Place, int] | None:
        """New places for what programs of `dims` need larger than it is, and the bytes they take on each rank."""
        # Shards are largest on rank 0, and a buffer is as large on each rank as on any.
        shapes = {b: BUFFERS[b].shape(dims, 0) for b in SHARED}
        moved = {b: list(shape) for b, shape in shapes.items() if math.prod(shape) > self._elements[b]}
        sizes = (aligned(math.prod(moved[b]) * BUFFERS[b].resolve_dtype(dims).itemsize) for b in moved)
        *offsets, size = accumulate(sizes, initial=0)
        return (Place(list(map(int, moved)), offsets, list(moved.values())), size) if moved else None

    def place(self, message: Place, files: Sequence[Mapping]) -> list[Buffer]:
        """Take new places, in each rank's file; the buffers that have moved."""
        moved = [Buffer(number) for number in message.buffers]
        for buffer, offset, shape in zip(moved, message.offsets, message.shapes, strict=True):
            self._places[buffer] = list(files), offset, tuple(shape)
            self._elements[buffer] = math.prod(shape)
        return moved

    def array(self, buffer: Buffer, rank: int) -> NDArray[Any]:
        files, offset, shape = self._places[buffer]
        return files[rank].array(offset, BUFFERS[buffer].resolve_dtype(self._dims).numpy, shape)

    def locate(self, address: int, size: int) -> Target:
        """What lies in a heap at `address`, for `size` bytes."""
        for buffer in self._places:
            itemsize = BUFFERS[buffer].resolve_dtype(self._dims).itemsize
            for rank in range(self._dims.tp):
                array = self.array(buffer, rank)
                offset = address - array.ctypes.data
                if offset >= 0 and offset + size <= array.nbytes:
                    return Target(buffer, rank, offset // itemsize, size // itemsize)
        raise MegakernelError(f"{size} bytes were stored at another rank outside of every buffer")

    def file(self, buffer: Buffer, rank: int) -> Mapping:
        return self._places[buffer][0][rank]
