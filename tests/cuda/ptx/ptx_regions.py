"""The memory that each instruction of a program may access, from what its operation declares (megakernel/isa)."""

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from fake_gpu import Arguments
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, Buffer, Dims, Operation, Phase, Space, accesses
from megakernel.isa.access import OWN, Access, Kind
from megakernel.program import SEGMENTS

# A region of memory: `rows` rows of `width` bytes, `stride` bytes apart. In layer l, add l * layer_stride to `base`.
REGION = np.dtype([(name, "<i8") for name in ("base", "rows", "width", "stride", "layer_stride", "kinds")])
# Bits of `kinds`. LOAD: may be copied to shared memory. USED: may change results, but is not checked for races.
READ, WRITE, LOAD, USED = 1, 2, 4, 8
_KINDS = {Kind.READ: READ, Kind.WRITE: WRITE, Kind.UPDATE: READ | WRITE}
_CACHES = (Buffer.K_CACHE, Buffer.V_CACHE)


class Regions(ctypes.Structure):
    """The struct of regions.h. The regions of record n of segment s are those from starts[s][n] to starts[s][n + 1]."""

    _fields_ = [
        ("regions", ctypes.c_void_p),
        ("starts", ctypes.c_void_p * len(SEGMENTS)),
        ("buffers", ctypes.c_void_p),  # a REGION for each buffer of each rank; its `kinds` is the Buffer
        ("count", ctypes.c_int64),
    ]

    def __init__(self, a: Arguments) -> None:
        found: list[tuple[int, ...]] = []
        self._held: list[NDArray[Any]] = []
        for segment in range(len(SEGMENTS)):
            own: dict[int, list[tuple[int, ...]]] = {}
            for phase, dims, numbers, columns in a.program.by_phase(segment):
                for i, number in enumerate(numbers.tolist()):
                    one = {name: column[i : i + 1] for name, column in columns.items()}
                    own.setdefault(number, []).extend(_Finder(a, dims, phase).regions(one))
            starts = [len(found)]
            for number in range(len(a.program.numbered(segment)[0])):
                found += own.get(number, [])
                starts.append(len(found))
            self.starts[segment] = self._keep(np.array(starts, np.int64))
        self.regions = self._keep(np.array(found, REGION))
        everything = [_whole(a, rank, b, b) for rank in range(a.dims.split.tp) for b in Buffer if a.addresses[rank, b]]
        self.buffers, self.count = self._keep(np.array(everything, REGION)), len(everything)

    def _keep(self, array: NDArray[Any]) -> int:
        self._held.append(array)
        return int(array.ctypes.data)


def _whole(a: Arguments, rank: int, buffer: Buffer, kinds: int = READ) -> tuple[int, ...]:
    dims, spec = a.ranks[rank], BUFFERS[buffer]
    stride = int(a.strides[rank, buffer])
    size = stride * dims.model.layers
    if not size:
        size = math.prod(spec.shape(dims, 0)) * spec.resolve_dtype(dims.model).itemsize
    return int(a.addresses[rank, buffer]), 1, size, max(size, 1), 0, kinds


def _corners(access: Access) -> list[int]:
    return [int(np.broadcast_to(v, 1)[0]) for v in (access.row, access.row_end, access.col, access.col_end)]


class _Finder:
    """Finds the regions of one instruction."""

    def __init__(self, a: Arguments, dims: Dims, phase: Phase) -> None:
        self.a, self.dims, self.phase = a, dims, phase
        self.table = a.table.rank(dims.split.rank)

    def regions(self, columns: dict[str, Any]) -> Iterator[tuple[int, ...]]:
        """Yield the regions. `columns` has the operands by name, each an array of one element."""
        rank, operation = self.dims.split.rank, self.phase.operation
        for access in accesses(self.phase, columns, self.dims):
            if access.buffer not in _CACHES:
                yield from self._boxes(access)
            elif access.kind is Kind.WRITE:
                yield from self._stored(access)
        if operation is Operation.ATTENTION:
            yield from self._attended(range(*self.table.slot_items[int(columns["slot"][0]) :][:2]))
            yield _whole(self.a, rank, Buffer.PARTIALS, READ | WRITE)
            yield _whole(self.a, rank, Buffer.SPLITS, READ | WRITE)
        if operation is Operation.GATHER:
            yield _whole(self.a, rank, Buffer.HISTORY)
        if operation is Operation.SAMPLE:
            yield from self._sampled(int(columns["row"][0]), int(columns["rows"][0]))
        for buffer in Buffer:  # any access is right: weights do not change in a launch
            if BUFFERS[buffer].space is Space.WEIGHT and self.a.addresses[rank, buffer]:
                yield _whole(self.a, rank, buffer)

    def _ranks(self, access: Access) -> list[int]:
        every = list(range(self.dims.split.tp))
        if access.rank is None:
            return every
        if not isinstance(access.rank, int):
            return [int(access.rank[0])]
        return [self.dims.split.rank] if access.rank == OWN else [access.rank] if access.rank >= 0 else every

    def _boxes(self, access: Access) -> Iterator[tuple[int, ...]]:
        row, end, col, col_end = _corners(access)
        spec = BUFFERS[access.buffer]
        for rank in self._ranks(access):
            dims = self.a.ranks[rank]
            shape, item = spec.shape(dims, 0), spec.resolve_dtype(dims.model).itemsize
            stride = (shape[-1] if len(shape) > 1 else 1) * item
            kind = _KINDS[access.kind]
            if dims.model.experts and access.buffer in (Buffer.ACT, Buffer.EXPERTS_OUT):
                # ROUTES is not known yet, so an expert may store in each of a row's places.
                count, place, width = dims.model.experts_per_token, col // shape[-1], min(col_end - col, shape[-1])
                every = range(count) if dims.by_expert or col_end - col > width else (place,)
                first = int(self.a.addresses[rank, access.buffer]) + (col - place * shape[-1]) * item
                for p in every:
                    yield first + (row * count + p) * stride, end - row, width * item, count * stride, 0, kind
                continue
            base = int(self.a.addresses[rank, access.buffer]) + row * stride + col * item
            if end > row and col_end > col:
                yield base, end - row, (col_end - col) * item, stride, 0, kind

    def _cache(
        self, buffer: Buffer, page: int, head: int, first: int, end: int, elements: tuple[int, int], kinds: int
    ) -> tuple[int, ...]:
        """Return the region of tokens [first, end) in a KV page, and of some elements of one KV head."""
        d, rank, item = self.dims, self.dims.split.rank, 2
        tokens, width, count = d.bucket.kv_page, d.model.head_dim, elements[1] - elements[0]
        begin = int(self.a.addresses[rank, buffer])
        begin += (page * d.split.rank_kv_heads + head) * tokens * width * item
        layer = int(self.a.strides[rank, buffer])
        if buffer is Buffer.K_CACHE:
            at = begin + (elements[0] * tokens + first) * item
            return at, count, (end - first) * item, tokens * item, layer, kinds
        at = begin + (first * width + elements[0]) * item
        return at, end - first, count * item, width * item, layer, kinds

    def _stored(self, access: Access) -> Iterator[tuple[int, ...]]:
        """Yield the K or V of token rows that an instruction stores. Its columns may begin or end inside a head."""
        row, end, col, col_end = _corners(access)
        width = self.dims.model.head_dim
        for r in range(row, end):
            sequence, position = int(self.table.row_seq[r]), int(self.table.positions[r])
            if sequence < 0:
                continue
            page, token = divmod(position, self.dims.bucket.kv_page)
            for head in range(col // width, -(-col_end // width)):
                part = max(col - head * width, 0), min(col_end - head * width, width)
                number = int(self.table.block_tables[sequence, page])
                yield self._cache(access.buffer, number, head, token, token + 1, part, WRITE)

    def _attended(self, items: range) -> Iterator[tuple[int, ...]]:
        """Yield the K and V that attention items (pieces of the work) use: up to the position of each item's last row.
        Loads fetch whole KV pages, and attention masks later positions. A load does not name its item. So if several
        items use a page, races are checked only for the tokens that all these items use."""
        t, size, uses = self.table, self.dims.bucket.kv_page, dict[tuple[int, int], list[int]]()
        for item in items:
            tokens = int(t.positions[t.item_row[item] + t.item_rows[item] - 1]) + 1
            blocks = range(int(t.item_block[item]), int(t.item_block[item] + t.item_blocks[item]))
            for block in blocks if t.item_seq[item] >= 0 else ():
                page = int(t.block_tables[t.item_seq[item], block])
                for head in range(int(t.item_kv_head[item]), int(t.item_kv_head[item] + t.item_kv_heads[item])):
                    uses.setdefault((page, head), []).append(max(0, min(tokens - block * size, size)))
        for (page, head), counts in uses.items():
            for end, kind in ((min(counts), READ), (max(counts), USED), (size, LOAD)):
                for buffer in _CACHES if max(counts) else ():
                    yield self._cache(buffer, page, head, 0, end, (0, self.dims.model.head_dim), kind)

    def _sampled(self, row: int, rows: int) -> Iterator[tuple[int, ...]]:
        """Yield the place of each sampled token in the history of every rank."""
        for r in range(row, row + rows):
            slot, position = int(self.table.sample_slot[r]), int(self.table.sample_position[r])
            for rank in range(self.dims.split.tp) if slot >= 0 else ():
                at = 4 * (slot * (self.dims.bucket.max_context + 1) + position)
                yield int(self.a.addresses[rank, Buffer.HISTORY]) + at, 1, 4, 4, 0, WRITE
