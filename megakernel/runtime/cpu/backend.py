"""The CPU backend. It runs the workers of all ranks on threads of this process."""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import BUFFERS, MAX_PHASES, Buffer, Dims, Dtype, Forward, Space, StepTable, column_share, slot_work
from ...isa.record import Records
from ...library import load
from ...machine import cpu_count
from ...model import families
from ...model.checkpoint import Checkpoint, WeightRows, array_of, converted, rows_of
from ...program import Program
from ...targets import MOST_HEAD_DIM
from ...trace import DTYPE, Trace, TraceHeader
from ..backend import Backend, Output
from ..buffers import check_program, check_table, holds_whole, write_history
from . import native

_ALIGNMENT = 64
_SLICE_MS = 50  # a wait is cut into slices, so that Python can handle Ctrl-C between them


class CpuBackend(Backend):
    """Executes programs on this machine's cores, with one model's weights and one KV cache.

    `dims` gives the model, ranks, page size and limits. Its row limits are ignored: each program has its own. `threads`
    is by default the number of usable cores. If a launch makes no progress for `deadlock_s` seconds, it ends with an
    error that names a blocked instruction. With `null`, the overhead can be measured: no weights are read, all
    arithmetic is left out, and every token is 0.

    If Python deletes this object or exits while a launch is running, the launch is aborted.
    """

    queues = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        dims: Dims,
        pages: int,
        *,
        threads: int | None = None,
        null: bool = False,
        deadlock_s: float = 60.0,
    ) -> None:
        if (
            dims.bucket.kv_block % dims.bucket.kv_page
            or dims.bucket.kv_page % 16
            or dims.model.head_dim % 8
            or dims.model.head_dim > MOST_HEAD_DIM
        ):
            raise MegakernelError(
                f"the cpu backend cannot run with {dims.bucket.kv_page} tokens in a KV page and {dims.model.head_dim} "
                f"elements in a head: a KV page needs a multiple of 16 tokens that divides {dims.bucket.kv_block}, and "
                f"a head needs a multiple of 8 elements, at most {MOST_HEAD_DIM}"
            )
        self.name = "null" if null else "cpu"
        self.threads = threads or cpu_count()
        # Each loaded program and its handle in the native library, by the program's id(). While the program is kept, no
        # other object can have this id.
        self._loaded: dict[int, tuple[Program, int]] = {}
        self._running: _Launch | None = None
        self.dims, self.pages, self.ranks = dims, pages, range(dims.split.tp)
        self._lib = load()
        self._model, self._storage = checkpoint.name, checkpoint.storage
        self._weights = families.weights(checkpoint.config)
        # Whether the LM head is the embedding table, stored in the same type. If so, both use the same memory.
        self._tied = checkpoint.config.tied and self._storage.get(Buffer.LM_HEAD) == self._storage.get(Buffer.EMBED)
        self._arrays: dict[tuple[int, Buffer], NDArray[np.generic]] = {}
        self._programs: list[int] = []  # handles
        if not null:
            self._check_memory()
        self._engine: int | None = self._lib.mk_create(
            ctypes.byref(dims.native), self.threads, cpu_count(), native.requested_simd(), null, deadlock_s
        )
        if self._engine is None:
            raise native.error()
        self._end = weakref.finalize(self, _end, self._lib, os.getpid(), self._engine, self._programs, self._arrays)
        self._grow((Space.STATE, Space.ACTIVATION, Space.OUTPUT), dims)
        self.load_weights(checkpoint, families.places(checkpoint.config))

    # -- weights

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        """Load weights, or replace loaded ones in the same memory. `places` are pairs (buffer, layer)."""
        for (buffer, layer), rank in product(() if self.name == "null" else places, self.ranks):
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
        """Make the rank's LM head use the rank's rows of the embedding table, which is already packed for matmuls."""
        panels = self.dims.ranks[rank].split.first_vocab // native.PANEL_COLUMNS
        table = self._lib.mk_bound(self._engine, rank, Buffer.EMBED, 0)
        self._lib.mk_bind(self._engine, rank, Buffer.LM_HEAD, 0, table + panels * ctypes.sizeof(native.CPanel))

    def _pack(self, rank: int, buffer: Buffer, layer: int, rows: Sequence[WeightRows]) -> None:
        """Store the rank's part of a matrix in the layout for matmuls, and give its address to the engine."""
        shape = self._shape(rank, buffer)
        parts = [WeightRows(dtype, np.ascontiguousarray(data)) for dtype, data in rows]
        ends = np.cumsum([len(data) for _, data in parts])
        if (ends % max(shape[-2], 1) % native.PANEL_COLUMNS).any():  # a panel would mix two parts
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
        """Store the rank's part of a buffer of vectors, and give the buffer's address to the native engine."""
        shape = self._shape(rank, buffer)
        if (rank, buffer) not in self._arrays:
            self.bind(rank, buffer, _aligned((len(BUFFERS[buffer].layers(self.dims.model)), *shape), array.dtype))
        self._arrays[rank, buffer][layer] = array.reshape(shape)

    def _home(self, rank: int, buffer: Buffer) -> int:
        """Return the rank whose copy of a buffer `rank` uses: 0 if all share one copy, otherwise `rank`. Ranks
        share weights that each needs as a whole, and outputs, because only one rank writes each row."""
        space = BUFFERS[buffer].space
        whole = space is Space.WEIGHT and holds_whole(buffer, self.dims.ranks[rank])
        return 0 if whole or space is Space.OUTPUT else rank

    def _shape(self, rank: int, buffer: Buffer) -> tuple[int, ...]:
        return BUFFERS[buffer].shape(self.dims.ranks[rank], self.pages)

    def _check_memory(self) -> None:
        need, model = 0.0, self.dims.model
        weights = set(self._weights) - ({Buffer.LM_HEAD} if self._tied else set())
        for buffer, spec in BUFFERS.items():
            if spec.space is Space.WEIGHT and buffer not in weights:
                continue
            kept = self._storage.get(buffer)
            bits = kept.bits(column_share(buffer, self.dims.split).whole) if kept else spec.resolve_dtype(model).bits
            own = sum(math.prod(self._shape(rank, buffer)) for rank in self.ranks if self._home(rank, buffer) == rank)
            need += len(spec.layers(model)) * own * bits / 8
        available = _available_memory()
        if need > available:
            raise MegakernelError(
                f"{self._model} in {Dtype(model.dtype).name} with {self.pages} KV pages needs "
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
                shape = (len(spec.layers(dims.model)), *spec.shape(dims.ranks[rank], self.pages))
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
        for layer in BUFFERS[buffer].layers(self.dims.model):
            self._lib.mk_bind(self._engine, rank, buffer, layer, array[layer].ctypes.data)

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> NDArray[Any]:
        """Return a view of a rank's buffer, shaped as BUFFERS declares. It may have more rows than a program uses.

        All ranks share one copy of the output buffers. Matrices have no view: they are stored in another layout.
        """
        view: NDArray[Any] = self._arrays[rank, buffer][layer]
        return view

    # -- launches

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        for rank in self.ranks:
            write_history(self.buffer(Buffer.HISTORY, rank=rank), slot, start, tokens)

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> _Launch:
        if self._running is not None:
            raise MegakernelError("the previous launch has not ended: wait for it or abort it")
        if self._engine is None:
            raise MegakernelError("the backend is closed: make another one")
        handle = self._load(program)
        check_table(program, table, self.pages)
        self._running = launch = _Launch(self, program, handle, table, trace)
        try:
            if self._lib.mk_launch_start(self._engine, handle, table.address, trace):
                raise native.error()
        except BaseException:
            launch.abort()
            raise
        return launch

    def close(self) -> None:
        if self._running is not None:
            self._running.abort()
        self._loaded.clear()
        self._end()
        self._engine = None

    def _load(self, program: Program) -> int:
        """Return a program's handle. The first call for a program checks and copies it, and may enlarge buffers."""
        if id(program) not in self._loaded:
            check_program(self.dims, program)
            self._check_weights(program.forward)
            self.fit(program.dims)
            self._loaded[id(program)] = program, self._copied(program)
        return self._loaded[id(program)][1]

    def _check_weights(self, forward: Forward) -> None:
        named = {b for phase in forward for b in (phase.weights, phase.bias, phase.norm) if b is not None}
        if absent := named.difference(self._weights):
            names = ", ".join(sorted(buffer.name for buffer in absent))
            raise MegakernelError(f"the program reads {names}, which {self._model} lacks: compile it for this model")

    def _copied(self, program: Program) -> int:
        """Copy a program into the native library, and return its handle there."""
        arrays = program.native_arrays()  # kept until mk_load_program has copied them
        phases = np.stack([program.forward.words(dims) for dims in program.dims.ranks])
        named = program.forward.by_number
        names = [named[n].name.encode() if n in named else b"" for n in range(MAX_PHASES + 1)]
        pointers = [(ctypes.c_void_p * len(group))(*(a.ctypes.data for a in group)) for group in arrays.values()]
        texts = (ctypes.c_char_p * len(names))(*names)
        source = native.CProgram(
            ctypes.addressof(program.dims.native),
            phases.ctypes.data,
            ctypes.addressof(texts),
            program.ranks,
            program.workers,
            program.counters,
            program.rank_queues,
            *pointers,
        )
        handle: int | None = self._lib.mk_load_program(ctypes.byref(source))
        if handle is None:
            raise MegakernelError(f"the program cannot be executed: {native.error()}")
        self._programs.append(handle)
        return handle

    # -- for tests

    def execute(self, instruction: Records, layer: int, table: StepTable, forward: Forward, rank: int = 0) -> None:
        """Run the work of one instruction record on a rank's buffers, without its waits and signals. An attention
        instruction runs all of its items."""
        self.fit(table.dims)
        dims, record = table.dims.ranks[rank], np.ascontiguousarray(instruction, dtype=np.int32)
        phases = forward.words(dims)
        addresses = (array.ctypes.data for array in (phases, table.words, record))
        self._lib.mk_execute(self._engine, ctypes.byref(dims.native), *addresses, layer)

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        """Delay one instruction by `seconds` in every traced launch; 0 ends the delay. `segment` is an index of
        SEGMENTS, and `record` the instruction's number in the trace."""
        self._lib.mk_delay(self._engine, segment, record, layer, round(seconds * 1e9))


class _Launch:
    def __init__(self, backend: CpuBackend, program: Program, handle: int, table: StepTable, trace: bool) -> None:
        self._backend, self._lib, self._engine = backend, backend._lib, backend._engine
        self._program, self._handle, self._table, self._traced = program, handle, table, trace
        self._begun = time.perf_counter()

    def wait(self) -> Output:
        """Wait for the launch's end. Return its output, with the seconds until the end was noticed. Call it once.
        Raises MegakernelError, which names a blocked wait, if the launch was aborted or made no progress."""
        try:
            self._finish()
        except BaseException:
            self.abort()
            raise
        self._backend._running = None
        seconds = time.perf_counter() - self._begun
        outputs = (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT, Buffer.LOGITS, Buffer.Y)
        rows = self._program.dims.bucket.logit_rows
        tokens, logprobs, logits, hidden = (self._backend.buffer(b)[:rows] for b in outputs)
        return Output(tokens, logprobs, logits, hidden, seconds, self._trace() if self._traced else None)

    def abort(self) -> None:
        if self._backend._running is not self:
            return
        try:
            self._lib.mk_abort(self._engine)
            with suppress(MegakernelError):  # the error only says that the launch was stopped
                self._finish()
            self._lib.mk_reset(self._engine, self._handle)
        finally:
            self._backend._running = None

    def _finish(self) -> None:
        while status := self._lib.mk_launch_wait(self._engine, _SLICE_MS):
            if status < 0:
                raise MegakernelError(f"the launch made no progress and was stopped: {native.error()}")

    def _trace(self) -> Trace:
        count = self._lib.mk_intervals(self._engine, None)
        intervals = np.zeros(max(count, 0), dtype=DTYPE)
        if count < 0 or self._lib.mk_intervals(self._engine, intervals.ctypes.data) < 0:
            raise native.error()
        header = TraceHeader(self._program.hash, "cpu", 1e-9, self._lib.mk_clock_cost(), clock_error_s=0.0, dropped=0)
        return Trace(header, intervals, slot_work(self._table)[None])


def _end(lib: ctypes.CDLL, process: int, engine: int, programs: list[int], memory: object) -> None:
    """Destroy a native engine. `memory` is unused: it only keeps arrays alive until the engine's threads have ended.
    Does nothing in a fork of the process `process`, because a fork does not have these threads."""
    if os.getpid() != process:
        return
    lib.mk_destroy(engine)
    for handle in programs:
        lib.mk_unload_program(handle)
    programs.clear()


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
