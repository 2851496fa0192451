"""The CPU backend. It runs the workers of all ranks on threads of this process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import MAX_PHASES, Buffer, Dims, Dtype, Forward, StepTable, slot_work
from ...isa.record import Records
from ...machine import cpu_count
from ...model.checkpoint import Checkpoint
from ...program import SEGMENTS, Program
from ...targets import MOST_HEAD_DIM
from ...trace import DTYPE, Trace, TraceHeader
from ..backend import Output
from ..buffers import check_program, check_table, write_history
from . import native
from .ranks import CpuRanks

_SLICE_MS = 50  # a wait is cut into slices, so that Python can handle Ctrl-C between them


class CpuBackend(CpuRanks):
    """Executes programs on this machine's cores, with one model's weights and one KV cache.

    `dims` gives the model, ranks, page size and limits. Its row limits are ignored: each program has its own. `threads`
    is by default the number of usable cores. If a launch makes no progress for `deadlock_s` seconds, it ends with an
    error that names a blocked instruction. With `null`, the overhead can be measured: no weights are read, all
    arithmetic is left out, and every token is 0.
    """

    queues = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        dims: Dims,
        pages: int,
        *,
        dtype: Dtype,
        threads: int | None = None,
        null: bool = False,
        deadlock_s: float = 60.0,
    ) -> None:
        if dims.model.dtype != dtype or dtype not in (Dtype.F32, Dtype.BF16):
            raise MegakernelError(
                f"the cpu backend needs the same dtype as dims, F32 or BF16: dtype is {dtype.name}, and dims have "
                f"{Dtype(dims.model.dtype).name}"
            )
        if (
            dims.bucket.kv_block % dims.bucket.kv_page
            or dims.bucket.kv_page % 16
            or dims.model.head_dim % 8
            or dims.model.head_dim > MOST_HEAD_DIM
        ):
            raise MegakernelError(
                f"the cpu backend needs KV pages of a multiple of 16 tokens that divides {dims.bucket.kv_block}, not "
                f"of {dims.bucket.kv_page}, and heads of a multiple of 8 elements up to {MOST_HEAD_DIM}, not of "
                f"{dims.model.head_dim}"
            )
        self.name = "null" if null else "cpu"
        self.threads = threads or cpu_count()
        # Each loaded program and its handle in the native library, by the program's id(). While the program is kept, no
        # other object can have this id.
        self._loaded: dict[int, tuple[Program, int]] = {}
        self._running: _Launch | None = None
        super().__init__(checkpoint, dims, pages, threads=self.threads, null=null, deadlock_s=deadlock_s)

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """The bytes that each rank has stored in other ranks' copies of buffers since the backend was created: [tp]."""
        return np.array([self._lib.mk_link_bytes(self._engine, rank) for rank in self.ranks], np.int64)

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        for rank in self.ranks:
            write_history(self.buffer(Buffer.HISTORY, rank=rank), slot, start, tokens)

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        if self.name != "null":
            super().load_weights(checkpoint, places)

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

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        return self.start(program, table, trace=trace).wait()

    def close(self) -> None:
        if self._running is not None:
            self._running.abort()
        self._loaded.clear()
        super().close()

    def _load(self, program: Program) -> int:
        """A program's handle. The first call for a program checks it, copies it, and enlarges buffers if necessary."""
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
            raise MegakernelError(f"the program reads {names}, which {self._model} does not have: compile it again")

    def _copied(self, program: Program) -> int:
        """Copy a program into the native library, and return its handle there."""
        lists = [getattr(program, name) for name in SEGMENTS] + [program.queues]
        # Python must keep these arrays until mk_load_program has copied them.
        arrays = [
            [np.ascontiguousarray(a, dtype=np.int32) for a in group]
            for group in (
                [s.records for s in lists],
                [s.offsets for s in lists],
                [program.totals_first, program.totals_middle, program.totals_last],
            )
        ]
        phases = np.stack([program.forward.words(dims) for dims in program.dims.ranks])
        named = program.forward.by_number
        names = [named[n].name.encode() if n in named else b"" for n in range(MAX_PHASES + 1)]
        pointers = [(ctypes.c_void_p * len(group))(*(a.ctypes.data for a in group)) for group in arrays]
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
        dims, record = table.dims.on(rank), np.ascontiguousarray(instruction, dtype=np.int32)
        phases = forward.words(dims)
        addresses = (array.ctypes.data for array in (phases, table.words, record))
        self._lib.mk_execute(self._engine, ctypes.byref(dims.native), *addresses, layer)

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        """Delay one instruction by `seconds` in every traced launch; 0 ends the delay. `segment` is an index of
        SEGMENTS, and `record` the instruction's number in the trace."""
        self._lib.mk_delay(self._engine, segment, record, layer, round(seconds * 1e9))


class _Launch:
    """A launch on all ranks."""

    def __init__(self, backend: CpuBackend, program: Program, handle: int, table: StepTable, trace: bool) -> None:
        self._backend, self._lib, self._engine = backend, backend._lib, backend._engine
        self._program, self._handle, self._table, self._traced = program, handle, table, trace
        self._begun = time.perf_counter()

    def wait(self) -> Output:
        """Wait until the launch ends, and return its output, with the time until its end was noticed. Call it once.
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
        dropped = ctypes.c_int64()
        count = self._lib.mk_intervals(self._engine, None, ctypes.byref(dropped))
        intervals = np.zeros(max(count, 0), dtype=DTYPE)
        if count < 0 or self._lib.mk_intervals(self._engine, intervals.ctypes.data, ctypes.byref(dropped)) < 0:
            raise native.error()
        header = TraceHeader(
            program=self._program.hash,
            source="cpu",
            tick_s=1e-9,
            read_s=native.clock_cost(),
            clock_error_s=0.0,
            dropped=dropped.value,
        )
        return Trace(header, intervals, slot_work(self._table)[None])
