"""Device memory of all ranks: the symmetric heap, and the weights, which are not part of the heap.

Every GPU of the node can access the heaps of all ranks. A buffer has the same offset in each heap, so its address on
another rank is easy to compute.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...isa import BUFFERS, Buffer, Dims, Forward, Space
from ...targets.launch import MAP_BYTES
from ...targets.pages import MAPS
from .driver import Gpu, encode_map
from .maps import map_layouts
from .node import GpuNode

_ALIGNMENT = 256
STATUS_BYTES = 256  # room for the word that aborts a launch, so that no other data share its cache lines
_READ = (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT)


def copy_bytes(buffer: Buffer, dims: Dims, pages: int) -> int:
    """Return the size in bytes of rank `dims.rank`'s copy of a buffer; for a layered buffer, the size of one layer."""
    spec = BUFFERS[buffer]
    return math.prod(spec.shape(dims, pages)) * spec.resolve_dtype(dims.model).itemsize


class Heap:
    """All buffers of all ranks of a model. Activations and outputs grow to fit the largest program so far."""

    def __init__(self, node: GpuNode, dims: Dims, pages: int) -> None:
        self.node, self.pages = node, pages
        self.generation = 0  # increases whenever buffers move to new addresses
        self._dims = dims
        self._sizes: dict[Buffer, int] = {}  # bytes of each activation and output buffer
        self._address: dict[tuple[int, Buffer], int] = {}
        self._grown: list[tuple[Gpu, int]] = []  # of each rank: GPU, address that `fit` may free
        self._kept: list[tuple[Gpu, int]] = []
        # The device addresses of tensor maps, by the GPU's number and the maps' contents.
        self._maps: dict[tuple[int, bytes], int] = {}
        # For each rank, the address of STATUS_BYTES zeroed bytes, which TOKENS_OUT and LOGPROBS_OUT follow.
        self.status: dict[int, int] = {}
        self._kept += self._place({b: self._most(b, dims) for b in _in(Space.STATE)})
        self.fit(dims)

    def _most(self, buffer: Buffer, dims: Dims) -> int:
        """Return the size in bytes of a buffer, with all layers, on the rank where it is largest."""
        return len(BUFFERS[buffer].layers(dims.model)) * max(copy_bytes(buffer, d, self.pages) for d in dims.ranks)

    def _place(self, sizes: dict[Buffer, int], head: int = 0) -> list[tuple[Gpu, int]]:
        """For each rank, make one allocation: `head` bytes, then buffers of these sizes. Return its GPU and address."""
        offsets, end = {}, head
        for buffer, size in sizes.items():
            offsets[buffer] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        made = []
        for rank in range(self._dims.split.tp):
            gpu = self.node.gpu(rank)
            base = gpu.allocate(max(end, _ALIGNMENT))
            made.append((gpu, base))
            for buffer, offset in offsets.items():
                self._address[rank, buffer] = base + offset
        return made

    def fit(self, dims: Dims) -> None:
        """Make room for programs with the sizes `dims`. Activations and outputs may move and be lost."""
        # The buffers _READ come first, because the host reads them after each launch with a single copy.
        buffers = (*_READ, *(b for b in _in(Space.ACTIVATION, Space.OUTPUT) if b not in _READ))
        sizes = {b: max(self._most(b, dims), self._sizes.get(b, 0)) for b in buffers}
        if sizes == self._sizes:
            return
        for gpu, address in self._grown:
            gpu.free(address)
        self._grown = self._place(sizes, STATUS_BYTES)
        self._sizes = sizes
        self.status = dict(enumerate(address for _, address in self._grown))
        self.generation += 1

    def keep(self, gpu: Gpu, size: int) -> int:
        """Allocate zeroed memory on a GPU, which is freed together with the heap. Returns its address."""
        address = gpu.allocate(max(size, _ALIGNMENT))
        self._kept.append((gpu, address))
        return address

    def bind(self, rank: int, buffer: Buffer, address: int) -> None:
        """Set the address of a rank's copy of the weights `buffer`."""
        self._address[rank, buffer] = address

    def address(self, rank: int, buffer: Buffer, layer: int = 0) -> int:
        return self._address[rank, buffer] + layer * self.stride(rank, buffer)

    def stride(self, rank: int, buffer: Buffer) -> int:
        """The distance in bytes between a buffer's data for two successive layers; 0 if the buffer is not layered."""
        if not BUFFERS[buffer].layered:
            return 0
        return copy_bytes(buffer, self._dims.ranks[rank], self.pages)

    # -- for launches

    def addresses(self) -> NDArray[np.uint64]:
        """Return the address of each buffer of each rank, [tp, buffers]; 0 for weights that the model does not have."""
        return np.array([[self._address.get((r, b), 0) for b in Buffer] for r in range(self._dims.split.tp)], np.uint64)

    def strides(self) -> NDArray[np.uint64]:
        """Return the distance in bytes between successive layers, for each buffer of each rank: [tp, buffers]."""
        return np.array([[self.stride(r, b) for b in Buffer] for r in range(self._dims.split.tp)], np.uint64)

    def maps(self, gpu: Gpu, forward: Forward, dims: Dims) -> int:
        """Return the address of a program's tensor maps, [tp, buffers, MAPS, MAP_BYTES]. Unused maps are zero.

        The maps stay unchanged while the heap exists, because the GPU's copy engine caches maps and could use old ones.
        """
        encoded = self._encoded(forward, dims)
        key = gpu.ordinal, encoded.tobytes()
        if key not in self._maps:
            self._maps[key] = self.keep(gpu, encoded.nbytes)
            gpu.upload(self._maps[key], encoded)
        return self._maps[key]

    def _encoded(self, forward: Forward, dims: Dims) -> NDArray[np.uint8]:
        out = np.zeros((dims.split.tp, len(Buffer), MAPS, MAP_BYTES), np.uint8)
        for d in dims.ranks:
            for (buffer, kind), layout in map_layouts(forward, d, self.pages).items():
                out[d.split.rank, buffer, kind] = encode_map(self.address(d.split.rank, buffer), layout)
        return out

    # -- for the host

    def read(self, rank: int, buffer: Buffer, layer: int, dims: Dims) -> NDArray[Any]:
        """Copy a rank's buffer to the host, in the shape that it has for the sizes `dims`."""
        d = dims.ranks[rank]
        spec = BUFFERS[buffer]
        gpu = self.node.gpu(rank)
        data = gpu.download(self.address(rank, buffer, layer), copy_bytes(buffer, d, self.pages))
        return data.view(spec.resolve_dtype(d.model).numpy).reshape(spec.shape(d, self.pages))

    def read_row(self, rank: int, buffer: Buffer, row: int, size: int) -> NDArray[np.uint8]:
        """Copy one row of a matrix, of `size` bytes, to the host."""
        return self.node.gpu(rank).download(self.address(rank, buffer) + row * size, size)

    def write(self, rank: int, buffer: Buffer, layer: int, array: NDArray[Any], *, at: int = 0) -> None:
        """Write `array` to a rank's copy of a buffer, from element `at` on."""
        gpu = self.node.gpu(rank)
        gpu.use()
        gpu.upload(self.address(rank, buffer, layer) + at * array.dtype.itemsize, array)

    def close(self) -> None:
        for gpu, address in self._kept + self._grown:
            gpu.free(address)
        self._kept.clear()
        self._grown.clear()


def _in(*spaces: Space) -> list[Buffer]:
    return [buffer for buffer, spec in BUFFERS.items() if spec.space in spaces]
