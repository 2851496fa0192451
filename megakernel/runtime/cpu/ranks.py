"""Packs a model's weights and allocates its buffers, and tells the native CPU library where they are."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import BUFFERS, Buffer, Dims, Dtype, Space
from ...library import load
from ...machine import cpu_count
from ...model import families
from ...model.checkpoint import Checkpoint, WeightRows, array_of, converted, rows_of
from . import native

_ALIGNMENT = 64


class CpuRanks:
    """The weights and buffers of all ranks of a model, which `threads` threads of this process execute.

    If Python deletes this object or exits while a launch is running, the launch is aborted.
    """

    def __init__(
        self, checkpoint: Checkpoint, dims: Dims, pages: int, *, threads: int, null: bool, deadlock_s: float
    ) -> None:
        self.dims, self.pages, self.ranks = dims, pages, range(dims.split.tp)
        self._lib = load()
        self._model, self._storage = checkpoint.name, checkpoint.storage
        self._weights = families.weights(checkpoint.config)
        # Whether the LM head shares the memory of the embedding table: they are equal and have one type.
        self._tied = checkpoint.config.tied and self._storage.get(Buffer.LM_HEAD) == self._storage.get(Buffer.EMBED)
        self._arrays: dict[tuple[int, Buffer], NDArray[np.generic]] = {}
        self._programs: list[int] = []  # handles
        if not null:
            self._check_memory()
        self._engine: int | None = self._lib.mk_create(
            ctypes.byref(dims.native), threads, cpu_count(), native.requested_simd(), null, deadlock_s
        )
        if self._engine is None:
            raise native.error()
        self._end = weakref.finalize(self, _end, self._lib, os.getpid(), self._engine, self._programs, self._arrays)
        self._grow((Space.STATE, Space.ACTIVATION, Space.OUTPUT), dims)
        if not null:
            self.load_weights(checkpoint, families.places(checkpoint.config))

    # -- weights

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        """Load weights, or replace loaded ones in the same memory. `places` are pairs (buffer, layer)."""
        for (buffer, layer), rank in product(places, self.ranks):
            home = self._home(rank, buffer)
            if buffer is Buffer.LM_HEAD and self._tied:
                self._tie(rank)
            elif home != rank:
                address = self._lib.mk_bound(self._engine, home, buffer, layer)
                self._lib.mk_bind(self._engine, rank, buffer, layer, address)
            elif BUFFERS[buffer].matrix:
                self._pack(rank, buffer, layer, rows_of(checkpoint, buffer, layer, self.dims.ranks[rank].split))
            else:
                self._put(rank, buffer, layer, array_of(checkpoint, buffer, layer, self.dims.ranks[rank].split))

    def _tie(self, rank: int) -> None:
        """Make the rank's LM head use the rank's rows of the packed embedding table."""
        panels = self.dims.ranks[rank].split.first_vocab // native.PANEL_COLUMNS
        table = self._lib.mk_bound(self._engine, rank, Buffer.EMBED, 0)
        self._lib.mk_bind(self._engine, rank, Buffer.LM_HEAD, 0, table + panels * ctypes.sizeof(native.CPanel))

    def _pack(self, rank: int, buffer: Buffer, layer: int, rows: Sequence[WeightRows]) -> None:
        """Store the rank's part of a matrix in the layout for matmuls, and give its address to the engine."""
        shape = self._shape(rank, buffer)
        parts = [WeightRows(dtype, np.ascontiguousarray(data)) for dtype, data in rows]
        ends = np.cumsum([len(data) for _, data in parts])
        if (ends % max(shape[-2], 1) % native.PANEL_COLUMNS).any():  # a panel would have rows of two parts
            kinds = {part.dtype for part in parts}
            if len(kinds) > 1:
                parts = converted(parts, shape[-1], Dtype.F32)
            parts = [WeightRows(parts[0].dtype, np.concatenate([data for _, data in parts]))]
        stack = self.dims.split.stack if BUFFERS[buffer].per_expert else ()
        described = [(dtype, len(data), data.ctypes.data) for dtype, data in parts]
        matrix = native.matrix(math.prod(stack), shape[len(stack) :], described)
        if self._lib.mk_pack(self._engine, rank, buffer, layer, ctypes.byref(matrix)):
            raise native.error()

    def _put(self, rank: int, buffer: Buffer, layer: int, array: NDArray[np.generic]) -> None:
        """Store the rank's part of a buffer of vectors, and tell the native engine where it is."""
        shape = self._shape(rank, buffer)
        if (rank, buffer) not in self._arrays:
            self.bind(rank, buffer, _aligned((len(_layers(buffer, self.dims)), *shape), array.dtype))
        self._arrays[rank, buffer][layer] = array.reshape(shape)

    def _home(self, rank: int, buffer: Buffer) -> int:
        """Return the rank whose copy of a buffer `rank` uses: 0 if all share one copy, otherwise `rank`."""
        return 0 if self._shared(buffer) else rank

    def _shared(self, buffer: Buffer) -> bool:
        """Whether all ranks share one copy of a buffer. This saves memory for weights that every rank needs as a whole.
        Outputs can be shared, because only one rank writes each row."""
        space, whole = BUFFERS[buffer].space, self._whole(buffer)
        return space is Space.OUTPUT or (
            space is Space.WEIGHT and all(self._shape(rank, buffer) == whole for rank in self.ranks)
        )

    def _shape(self, rank: int, buffer: Buffer) -> tuple[int, ...]:
        return BUFFERS[buffer].shape(self.dims.ranks[rank], self.pages)

    def _whole(self, buffer: Buffer) -> tuple[int, ...]:
        return BUFFERS[buffer].shape(self.dims.changed(tp=1), self.pages)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all packed matrices of all ranks."""
        return int(self._lib.mk_weight_bytes(self._engine))

    def _bytes(self, rank: int, buffer: Buffer) -> float:
        """Return the bytes of a rank's copy of a buffer, all layers together."""
        kept = self._storage.get(buffer)
        bits = kept.bits(self._whole(buffer)[-1]) if kept else BUFFERS[buffer].resolve_dtype(self.dims.model).bits
        return len(_layers(buffer, self.dims)) * math.prod(self._shape(rank, buffer)) * bits / 8

    def _check_memory(self) -> None:
        need = sum(
            self._bytes(rank, buffer)
            for buffer, spec in BUFFERS.items()
            if (spec.space is not Space.WEIGHT or buffer in self._weights)
            and not (buffer is Buffer.LM_HEAD and self._tied)
            for rank in self.ranks
            if self._home(rank, buffer) == rank
        )
        available = _available_memory()
        if need > available:
            raise MegakernelError(
                f"{self._model} in {Dtype(self.dims.model.dtype).name} with {self.pages} KV pages needs "
                f"{need / 2**30:.1f} GiB of memory, but only {available / 2**30:.1f} GiB are available: "
                "use bf16, weights in q8_0 or q4_0, a smaller model or a shorter context"
            )

    # -- buffers

    def fit(self, dims: Dims) -> None:
        """Make room for programs with the sizes `dims`. The contents of activations and outputs may be lost."""
        self._grow((Space.ACTIVATION, Space.OUTPUT), dims)

    def _grow(self, spaces: Collection[Space], dims: Dims) -> None:
        for buffer, spec in BUFFERS.items():
            if spec.space not in spaces:
                continue
            for rank in self.ranks:
                shape = (len(_layers(buffer, dims)), *spec.shape(dims.on(rank), self.pages))
                have = self._arrays.get((rank, buffer))
                if have is not None:
                    shape = tuple(max(h, s) for h, s in zip(have.shape, shape, strict=True))
                    if have.shape == shape:
                        continue
                own, kind = self._home(rank, buffer) == rank, spec.resolve_dtype(dims.model).numpy
                self.bind(rank, buffer, _aligned(shape, kind) if own else self._arrays[0, buffer])

    def bind(self, rank: int, buffer: Buffer, array: NDArray[np.generic]) -> None:
        """Use `array` [layers, ...] as the rank's copy of a buffer, and give its address to the engine."""
        self._arrays[rank, buffer] = array
        for layer in _layers(buffer, self.dims):
            self._lib.mk_bind(self._engine, rank, buffer, layer, array[layer].ctypes.data)

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> NDArray[Any]:
        """Return a view of a rank's buffer, in its declared shape. The view may have more rows than a program uses.

        All ranks share one copy of the output buffers. Matrices have no view: they are stored in another layout.
        """
        view: NDArray[Any] = self._arrays[rank, buffer][layer]
        return view

    def close(self) -> None:
        """Abort a running launch, and release threads, programs and weights."""
        self._end()
        self._engine = None


def _end(lib: ctypes.CDLL, process: int, engine: int, programs: list[int], memory: object) -> None:
    """Destroy a native engine. `memory` is unused: it only keeps arrays alive until the engine's threads have ended.
    Does nothing in a fork of the process `process`, because a fork does not have these threads."""
    if os.getpid() != process:
        return
    lib.mk_destroy(engine)
    for handle in programs:
        lib.mk_unload_program(handle)
    programs.clear()


def _layers(buffer: Buffer, dims: Dims) -> range:
    return range(dims.model.layers if BUFFERS[buffer].layered else 1)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Return an array of zeros that begins at the start of a cache line."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _available_memory() -> int:
    """Return the number of bytes that can be allocated without swapping, and within the limit of a cgroup v2."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        return min(available, limit)
    except (OSError, ValueError):
        return available
