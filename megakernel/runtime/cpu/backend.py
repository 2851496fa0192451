"""The CPU backend: every rank on the threads of this process."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import Buffer, Dims, Dtype, StepTable, slot_work
from ...isa.record import Records
from ...machine import cpu_count
from ...model.checkpoint import Checkpoint
from ...program import Program
from ...trace import Trace, TraceHeader
from ..backend import Output
from ..buffers import check_program, check_table, write_history
from . import native
from .ranks import CpuRanks

_DEADLOCK_S = 60.0


@dataclass
class _Loaded:
    """A program in the library. `program` keeps the object alive whose id is the key."""

    program: Program
    handle: int
    hash: str | None = None


class CpuBackend:
    """One model's weights and KV pool on this machine's cores.

    `dims` gives the model, ranks, page size and limits; its bucket fields do not matter. `null` executes everything
    but the arithmetic (no weights are read, every token is 0). Threads default to the usable cores. A launch in which
    nothing happens for `deadlock_s` seconds ends with an error that names a blocked instruction.
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
        if dims.kv_block % dims.page or dims.page % 16 or dims.head_dim % 8:
            raise MegakernelError(
                "the cpu backend needs pages of 16 n tokens that divide the KV block, and heads of 8 n elements"
            )
        self.name = "null" if null else "cpu"
        self.dims = dims
        self.pages = pages
        self.threads = threads or cpu_count()
        self._programs: dict[int, _Loaded] = {}
        self._running: CpuLaunch | None = None
        self._closed = False
        self._ranks = CpuRanks(
            checkpoint, dims, pages, range(dims.tp), threads=self.threads, null=null, deadlock_s=deadlock_s
        )

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> NDArray[Any]:
        """View of a rank's copy of a buffer that is not a packed matrix, in its declared shape.

        Rows may exceed the bucket's. Ranks share one copy of the outputs.
        """
        return self._ranks.buffer(buffer, layer, rank)

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """What each rank has stored in other ranks' copies, in bytes, since the backend was made."""
        return np.array([self._ranks.link_bytes(rank) for rank in range(self.dims.tp)], np.int64)

    # -- launches

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> CpuLaunch:
        """Begin to execute one step. The launch before must have ended, by `wait` or `abort`."""
        if self._running is not None:
            raise MegakernelError("the launch before has not ended: wait for it or abort it")
        loaded = self._loaded(program)
        check_table(program, table, self.pages)
        self._ranks.start(loaded.handle, table.words, trace)
        self._running = CpuLaunch(self, loaded, table, trace)
        return self._running

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""
        return self.start(program, table, trace=trace).wait()

    def _loaded(self, program: Program) -> _Loaded:
        """The program in the library; on first sight checked, copied, and activations grown to its bucket."""
        if self._closed:
            raise MegakernelError("the backend is closed: make another one")
        if (known := self._programs.get(id(program))) is not None:
            return known
        check_program(self.dims, program)
        self._ranks.fit(program.dims)
        return self._programs.setdefault(id(program), _Loaded(program, self._ranks.load(program)))

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """Set HISTORY[slot, start : start + len(tokens)]; between launches."""
        for rank in range(self.dims.tp):
            write_history(self.buffer(Buffer.HISTORY, rank=rank), slot, start, tokens)

    # -- for tests

    def execute(self, instruction: Records, layer: int, table: StepTable, rank: int = 0) -> None:
        """Run one record's work on a rank's buffers, without waits and signals. A split's items all together."""
        self._ranks.fit(table.dims)
        self._ranks.execute(replace(table.dims, rank=rank), table.words, instruction, layer)

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        """Stall one instruction of every traced launch (segment 0: prologue, 1: body, 2: epilogue); 0 ends it."""
        self._ranks.delay(segment, record, layer, seconds)

    def close(self) -> None:
        """Abort what runs, release threads and weights. Further launches are errors."""
        if self._running is not None:
            self._running.abort()
        self._programs.clear()
        self._ranks.close()
        self._closed = True


class CpuLaunch:
    """A launch in the library, which has one at a time."""

    def __init__(self, backend: CpuBackend, loaded: _Loaded, table: StepTable, trace: bool) -> None:
        self._backend, self._ranks, self._loaded = backend, backend._ranks, loaded
        self._table, self._traced = table, trace
        self._begin = time.perf_counter()

    def wait(self) -> Output:
        """Its outcome, once; `seconds` is the time until it was seen to end. Ctrl-C aborts it within a second."""
        try:
            while not self._ranks.wait():
                pass
        except MegakernelError as e:
            self._failed()
            raise MegakernelError(f"the launch made no progress and was stopped: {e}") from None
        except BaseException:
            self.abort()
            raise
        self._backend._running = None
        seconds = time.perf_counter() - self._begin
        rows = self._loaded.program.dims.logit_rows
        tokens, logprobs, logits = (
            self._backend.buffer(b)[:rows] for b in (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT, Buffer.LOGITS)
        )
        return Output(tokens, logprobs, logits, seconds, self._trace() if self._traced else None)

    def abort(self) -> None:
        """End it soon, and return when it has; its outcome is lost. Does nothing to a launch that has ended."""
        if self._backend._running is not self:
            return
        self._ranks.abort()
        try:
            while not self._ranks.wait():
                pass
        except MegakernelError:
            pass
        self._failed()

    def _failed(self) -> None:
        """No thread runs the program: make it ready for another launch."""
        self._ranks.reset(self._loaded.handle)
        self._backend._running = None

    def _trace(self) -> Trace:
        intervals, dropped = self._ranks.intervals()
        if self._loaded.hash is None:
            self._loaded.hash = self._loaded.program.hash
        header = TraceHeader(
            program=self._loaded.hash,
            source="cpu",
            tick_s=1e-9,
            read_s=native.clock_cost(),
            clock_error_s=0.0,
            dropped=dropped,
        )
        return Trace(header, intervals, slot_work(self._table)[None])
