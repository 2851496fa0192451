"""The CPU backend. It runs the workers of all ranks on threads of this process."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import Buffer, Dims, Dtype, Forward, StepTable, slot_work
from ...isa.record import Records
from ...machine import cpu_count
from ...model.checkpoint import Checkpoint
from ...program import Program
from ...targets.cpu import MOST_HEAD_DIM
from ...trace import Trace, TraceHeader
from ..backend import Output
from ..buffers import check_program, check_table, write_history
from . import native
from .ranks import CpuRanks


class CpuBackend:
    """Executes programs on this machine's cores, with one model's weights and one KV cache.

    `dims` gives the model, ranks, page size and limits. Its row limits are ignored: each program has its own. `threads`
    is by default the number of usable cores. If a launch makes no progress for `deadlock_s` seconds, it ends with an
    error that names a blocked instruction. With `null`, the overhead can be measured: no weights are read, all
    arithmetic is left out, and every token is 0.
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
        self.dims = dims
        self.pages = pages
        self.threads = threads or cpu_count()
        # Each loaded program and its handle in the native library, by the program's id(). While the program is kept, no
        # other object can have this id.
        self._programs: dict[int, tuple[Program, int]] = {}
        self._running: _Launch | None = None
        self._closed = False
        self._ranks = CpuRanks(checkpoint, dims, pages, threads=self.threads, null=null, deadlock_s=deadlock_s)

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> NDArray[Any]:
        """Return a view of a rank's buffer, in its declared shape. The view may have more rows than a program uses.

        All ranks share one copy of the output buffers. Matrices have no view: they are stored in another layout.
        """
        return self._ranks.buffer(buffer, layer, rank)

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """The bytes that each rank has stored in other ranks' copies of buffers since the backend was created: [tp]."""
        return np.array([self._ranks.link_bytes(rank) for rank in range(self.dims.split.tp)], np.int64)

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        for rank in range(self.dims.split.tp):
            write_history(self.buffer(Buffer.HISTORY, rank=rank), slot, start, tokens)

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        if self.name != "null":
            self._ranks.load_weights(checkpoint, places)

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> _Launch:
        """Start to execute one step. The previous launch must have ended, by `wait` or `abort`."""
        if self._running is not None:
            raise MegakernelError("the previous launch has not ended: wait for it or abort it")
        if self._closed:
            raise MegakernelError("the backend is closed: make another one")
        check_program(self.dims, program)
        check_table(program, table, self.pages)
        self._running = launch = _Launch(self, program, table, trace)
        try:
            launch.begin(self._load(program))
        except BaseException:
            launch.abort()
            raise
        return launch

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""
        return self.start(program, table, trace=trace).wait()

    def close(self) -> None:
        """Abort a running launch, and release threads and weights. Further launches are errors."""
        if self._running is not None:
            self._running.abort()
        self._closed = True
        self._programs.clear()
        self._ranks.close()

    def _load(self, program: Program) -> int:
        """A program's handle. The first call for a program checks it, copies it, and enlarges buffers if necessary."""
        if id(program) not in self._programs:
            self._ranks.fit(program.dims)
            self._programs[id(program)] = program, self._ranks.load(program)
        return self._programs[id(program)][1]

    # -- for tests

    def execute(self, instruction: Records, layer: int, table: StepTable, forward: Forward, rank: int = 0) -> None:
        """Run the work of one instruction record on a rank's buffers, without its waits and signals, for tests. An
        attention instruction runs all of its items."""
        self._ranks.fit(table.dims)
        self._ranks.execute(table.dims.on(rank), table.words, instruction, layer, forward)

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        self._ranks.delay(segment, record, layer, seconds)


class _Launch:
    """A launch on all ranks."""

    def __init__(self, backend: CpuBackend, program: Program, table: StepTable, trace: bool) -> None:
        self._backend, self._ranks = backend, backend._ranks
        self._program, self._table, self._traced = program, table, trace
        self._begun = 0.0
        self._handle: int | None = None  # handle of the program, from the start of the launch on

    def begin(self, handle: int) -> None:
        """Start all ranks."""
        self._handle = handle
        self._begun = time.perf_counter()
        self._ranks.start(handle, self._table.words, self._traced)

    def wait(self) -> Output:
        """Wait until the launch ends, and return its output, with the time until its end was noticed. Call it once."""
        try:
            self._finish()
        except BaseException:
            self.abort()
            raise
        self._backend._running = None
        seconds = time.perf_counter() - self._begun
        outputs = (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT, Buffer.LOGITS, Buffer.Y)
        rows = self._program.dims.bucket.logit_rows
        tokens, logprobs, logits, hidden = (self._ranks.buffer(b)[:rows] for b in outputs)
        return Output(tokens, logprobs, logits, hidden, seconds, self._trace() if self._traced else None)

    def abort(self) -> None:
        """Stop the launch, whose output is then lost, and return when it has stopped. Does nothing if it has ended."""
        if self._backend._running is not self:
            return
        try:
            if self._handle is not None:
                self._ranks.abort()
                with suppress(MegakernelError):  # the error only says that the launch was stopped
                    self._finish()
                self._ranks.reset(self._handle)
        finally:
            self._backend._running = None

    def _finish(self) -> None:
        while not self._ranks.wait():
            pass

    def _trace(self) -> Trace:
        intervals, dropped = self._ranks.intervals()
        header = TraceHeader(
            program=self._program.hash,
            source="cpu",
            tick_s=1e-9,
            read_s=native.clock_cost(),
            clock_error_s=0.0,
            dropped=dropped,
        )
        return Trace(header, intervals, slot_work(self._table)[None])
