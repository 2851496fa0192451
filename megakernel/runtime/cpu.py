"""The CPU backend: packed weights and NumPy-owned state, executed by the native interpreter."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Buffer, BufferSpec, Dims, Dtype, Space, StepTable
from ..isa.record import Records
from ..machine import cpu_count
from ..model.checkpoint import Checkpoint
from ..program import Program
from ..trace import DTYPE, Trace, TraceHeader
from . import native
from .backend import Output
from .buffers import check_program, check_table, write_history

_ALIGNMENT = 64
_SLICE_MS = 50
_DEADLOCK_S = 60.0


@dataclass
class _Loaded:
    """A program in the library. `program` keeps the object alive whose id is the key."""

    program: Program
    handle: int
    hash: str | None = None


class CpuBackend:
    """One model's weights and KV pool on this machine's cores.

    `dims` gives the model, page size and limits; its bucket fields do not matter. `null` executes everything but the
    arithmetic (no weights are read, every token is 0). Threads default to the usable cores. A launch in which nothing
    happens for `deadlock_s` seconds ends with an error that names a blocked instruction.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dims: Dims,
        pages: int,
        *,
        dtype: Dtype,
        threads: int | None = None,
        null: bool = False,
        deadlock_s: float = _DEADLOCK_S,
    ) -> None:
        if dims.dtype != dtype or dtype not in (Dtype.F32, Dtype.BF16):
            raise MegakernelError(f"the cpu backend was asked for {dtype.name} with dims of {Dtype(dims.dtype).name}")
        if dims.kv_block % dims.page or dims.kv_block % 16 or dims.head_dim % 8:
            raise MegakernelError("the cpu backend needs pages that divide the KV block and heads of 8 n elements")
        self.name = "null" if null else "cpu"
        self.dims = dims
        self.pages = pages
        self.threads = threads or cpu_count()
        self._lib = native.library()
        self._dims = native.CDims.of(dims)
        self._arrays: dict[Buffer, NDArray[np.generic]] = {}
        self._programs: dict[int, _Loaded] = {}
        self._running: CpuLaunch | None = None
        if not null:
            self._check_memory(checkpoint)
        self._engine: int | None = self._lib.mk_create(
            ctypes.byref(self._dims), self.threads, native.requested_simd(), null, deadlock_s
        )
        if self._engine is None:
            raise native.error()
        for spec in BUFFERS.values():
            if spec.space is not Space.WEIGHT:
                self._grow(spec, dims)
        if not null:
            self._load_weights(checkpoint)

    # -- weights and buffers

    def _load_weights(self, checkpoint: Checkpoint) -> None:
        for buffer, spec in BUFFERS.items():
            if spec.space is not Space.WEIGHT:
                continue
            if buffer is Buffer.LM_HEAD and checkpoint.config.tied:
                self._lib.mk_tie(self._engine)
                continue
            if not self._lib.mk_packed_bytes(ctypes.byref(self._dims), buffer):
                layers = [self._load(checkpoint, spec, layer) for layer in self._layers(spec)]
                self._arrays[buffer] = _aligned((len(layers), *layers[0].shape), layers[0].dtype)
                self._arrays[buffer][:] = layers
                self._bind(spec)
                continue
            for layer in self._layers(spec):
                source = self._load(checkpoint, spec, layer)
                if self._lib.mk_pack(self._engine, buffer, layer, source.ctypes.data):
                    raise native.error()

    def _load(self, checkpoint: Checkpoint, spec: BufferSpec, layer: int) -> NDArray[np.generic]:
        array = np.ascontiguousarray(checkpoint.load(spec.buffer, layer, Dtype(self.dims.dtype)))
        shape, kind = spec.shape(self.dims, self.pages), spec.resolve_dtype(self.dims).numpy
        if array.shape != shape or array.dtype != kind:
            raise MegakernelError(
                f"{checkpoint.name}: {spec.buffer.name} of layer {layer} is {array.shape} {array.dtype}, "
                f"the program needs {shape} {kind}"
            )
        return array

    def _layers(self, spec: BufferSpec) -> range:
        return range(self.dims.layers if spec.layered else 1)

    def _grow(self, spec: BufferSpec, dims: Dims) -> None:
        """Make a buffer large enough for `dims`; contents are kept only where it already is."""
        shape = (len(self._layers(spec)), *spec.shape(dims, self.pages))
        have = self._arrays.get(spec.buffer)
        if have is not None and all(h >= s for h, s in zip(have.shape, shape, strict=True)):
            return
        if have is not None:
            shape = tuple(max(h, s) for h, s in zip(have.shape, shape, strict=True))
        self._arrays[spec.buffer] = _aligned(shape, spec.resolve_dtype(dims).numpy)
        self._bind(spec)

    def _bind(self, spec: BufferSpec) -> None:
        for layer in self._layers(spec):
            self._lib.mk_bind(self._engine, spec.buffer, layer, self._arrays[spec.buffer][layer].ctypes.data)

    def _check_memory(self, checkpoint: Checkpoint) -> None:
        need = 0
        for buffer, spec in BUFFERS.items():
            if buffer is Buffer.LM_HEAD and checkpoint.config.tied:
                continue
            elements = int(np.prod(spec.shape(self.dims, self.pages), dtype=np.int64))
            plain = elements * spec.resolve_dtype(self.dims).itemsize
            packed = int(self._lib.mk_packed_bytes(ctypes.byref(self._dims), buffer))
            need += len(self._layers(spec)) * (packed or plain)
        available = _available_memory()
        if need > available:
            raise MegakernelError(
                f"{checkpoint.name} in {Dtype(self.dims.dtype).name} with {self.pages} KV pages needs "
                f"{need / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available: "
                "use bf16, a smaller model or a shorter context"
            )

    def buffer(self, buffer: Buffer, layer: int = 0) -> NDArray[Any]:
        """View of a buffer that is not a packed matrix, in its declared shape (rows may exceed the bucket's)."""
        view: NDArray[Any] = self._arrays[buffer][layer]
        return view

    # -- launches

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> CpuLaunch:
        """Begin to execute one step. The launch before must have ended, by `wait` or `abort`."""
        if self._running is not None:
            raise MegakernelError("the launch before has not ended: wait for it or abort it")
        loaded = self._loaded(program)
        check_table(program, table, self.pages)
        self._running = launch = CpuLaunch(self, loaded, trace)
        launch.start(table)
        return launch

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""
        return self.start(program, table, trace=trace).wait()

    def _loaded(self, program: Program) -> _Loaded:
        """The program in the library; on first sight checked, copied, and activations grown to its bucket."""
        if self._engine is None:
            raise MegakernelError("the backend is closed: make another one")
        if (known := self._programs.get(id(program))) is not None:
            return known
        check_program(self.dims, program)
        for spec in BUFFERS.values():
            if spec.space in (Space.ACTIVATION, Space.OUTPUT):
                self._grow(spec, program.dims)
        segments = (program.prologue, program.body, program.epilogue)
        # Held until the call returns: the library copies.
        arrays = [
            [np.ascontiguousarray(a, dtype=np.int32) for a in group]
            for group in (
                [s.records for s in segments],
                [s.offsets for s in segments],
                [program.totals_first, program.totals_middle, program.totals_last],
            )
        ]
        pointers = [(ctypes.c_void_p * 3)(*(a.ctypes.data for a in group)) for group in arrays]
        dims = native.CDims.of(program.dims)
        source = native.CProgram(ctypes.pointer(dims), program.ranks, program.workers, program.counters, *pointers)
        handle = self._lib.mk_load_program(ctypes.byref(source))
        if handle is None:
            raise MegakernelError(f"the program cannot be executed: {native.error()}")
        self._programs[id(program)] = _Loaded(program, handle)
        return self._programs[id(program)]

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """Set HISTORY[slot, start : start + len(tokens)]; between launches."""
        write_history(self.buffer(Buffer.HISTORY), slot, start, tokens)

    # -- for tests

    def execute(self, instruction: Records, layer: int, table: StepTable) -> None:
        """Run one record's work on the buffers, without its waits and signals. A split's items all together."""
        for spec in BUFFERS.values():
            if spec.space in (Space.ACTIVATION, Space.OUTPUT):
                self._grow(spec, table.dims)
        record = np.ascontiguousarray(instruction, dtype=np.int32)
        dims = native.CDims.of(table.dims)
        self._lib.mk_execute(self._engine, ctypes.byref(dims), table.words.ctypes.data, record.ctypes.data, layer)

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        """Stall one instruction of every traced launch (segment 0: prologue, 1: body, 2: epilogue); 0 ends it."""
        self._lib.mk_delay(self._engine, segment, record, layer, round(seconds * 1e9))

    def close(self) -> None:
        """Abort what runs, release threads and weights. Further launches are errors."""
        if self._running is not None:
            self._running.abort()
        for loaded in self._programs.values():
            self._lib.mk_unload_program(loaded.handle)
        self._programs.clear()
        if self._engine is not None:
            self._lib.mk_destroy(self._engine)
            self._engine = None


class CpuLaunch:
    """A launch in the library, which has one at a time."""

    def __init__(self, backend: CpuBackend, loaded: _Loaded, trace: bool) -> None:
        self._backend, self._loaded, self._traced = backend, loaded, trace
        self._begin = time.perf_counter()

    def start(self, table: StepTable) -> None:
        """Begin; the library copies the table."""
        backend, handle = self._backend, self._loaded.handle
        if backend._lib.mk_launch_start(backend._engine, handle, table.words.ctypes.data, self._traced):
            backend._running = None
            raise native.error()

    def wait(self) -> Output:
        """Its outcome, once; `seconds` is the time until it was seen to end. Ctrl-C aborts it within a second."""
        try:
            status = self._sleep()
        except BaseException:
            self.abort()
            raise
        if status < 0:
            raise MegakernelError(f"the launch made no progress and was stopped: {native.error()}")
        seconds = time.perf_counter() - self._begin
        rows = self._loaded.program.dims.logit_rows
        tokens, logprobs, logits = (
            self._backend.buffer(b)[:rows] for b in (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT, Buffer.LOGITS)
        )
        return Output(tokens, logprobs, logits, seconds, self._trace() if self._traced else None)

    def abort(self) -> None:
        """End it soon, and return when it has; its outcome is lost. Does nothing to a launch that has ended."""
        if self._backend._running is self:
            self._backend._lib.mk_abort(self._backend._engine)
            self._sleep()

    def _sleep(self) -> int:
        """Until the launch has ended: its status."""
        backend = self._backend
        while (status := backend._lib.mk_launch_wait(backend._engine, _SLICE_MS)) == 1:
            pass
        backend._running = None
        return int(status)

    def _trace(self) -> Trace:
        backend, loaded = self._backend, self._loaded
        dropped = ctypes.c_int64()
        count = backend._lib.mk_intervals(backend._engine, None, ctypes.byref(dropped))
        intervals = np.zeros(count, dtype=DTYPE)
        backend._lib.mk_intervals(backend._engine, intervals.ctypes.data, ctypes.byref(dropped))
        if loaded.hash is None:
            loaded.hash = loaded.program.hash
        header = TraceHeader(
            program=loaded.hash,
            source="cpu",
            tick_s=1e-9,
            read_s=backend._lib.mk_clock_cost(),
            clock_error_s=0.0,
            dropped=dropped.value,
        )
        return Trace(header, intervals)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Zeros whose first byte is on a cache line."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _available_memory() -> int:
    """Bytes that can be allocated without swapping, within a cgroup v2 limit where there is one."""
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
