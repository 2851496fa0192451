"""Code that the CPU backends share, whether their ranks are threads or processes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import Dims, Dtype, StepTable, slot_work
from ...isa.targets import MOST_HEAD_DIM
from ...machine import cpu_count
from ...program import Program
from ...trace import Intervals, Trace, TraceHeader
from ..backend import Output
from ..buffers import check_program, check_table
from . import native

DEADLOCK_S = 60.0


@dataclass(frozen=True)
class Loaded:
    """A program that the ranks have loaded. It keeps the program object alive, because programs are found by
    the object's id.
    """

    program: Program

    @cached_property
    def hash(self) -> str:
        return self.program.hash


class RanksBackend(ABC):
    """A backend with one model's weights and KV pool, which runs at most one launch at a time."""

    def __init__(self, dims: Dims, pages: int, dtype: Dtype, threads: int | None, null: bool) -> None:
        if dims.dtype != dtype or dtype not in (Dtype.F32, Dtype.BF16):
            raise MegakernelError(
                f"the cpu backend needs the same dtype as dims, F32 or BF16: dtype is {dtype.name}, and dims have "
                f"{Dtype(dims.dtype).name}"
            )
        if dims.kv_block % dims.kv_page or dims.kv_page % 16 or dims.head_dim % 8 or dims.head_dim > MOST_HEAD_DIM:
            raise MegakernelError(
                "the cpu backend needs a page size that is a multiple of 16 and divides the KV block, and a head size "
                f"that is a multiple of 8 and at most {MOST_HEAD_DIM}"
            )
        self.name = "null" if null else "cpu"
        self.dims = dims
        self.pages = pages
        self.threads = threads or cpu_count()
        self._running: RanksLaunch | None = None
        self._closed = False

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> RanksLaunch:
        """Begin to execute one step. The previous launch must have ended, by `wait` or `abort`."""
        if self._running is not None:
            raise MegakernelError("the previous launch has not ended: wait for it or abort it")
        self._check_open()
        check_program(self.dims, program)
        check_table(program, table, self.pages)
        self._running = launch = self._launch(program, table, trace)
        try:
            launch.begin()
        except BaseException:
            launch.abort()
            raise
        return launch

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""
        return self.start(program, table, trace=trace).wait()

    def close(self) -> None:
        """Abort a running launch; release threads, processes and weights. Further launches are errors."""
        if self._running is not None:
            self._running.abort()
        self._closed = True
        self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise MegakernelError("the backend is closed: make another one")

    @abstractmethod
    def _launch(self, program: Program, table: StepTable, trace: bool) -> RanksLaunch:
        """Return a launch that has not started yet."""

    @abstractmethod
    def _release(self) -> None:
        """Release everything. Safe to call twice."""


class RanksLaunch(ABC):
    """A launch on all ranks. `loaded` is the program that they run, or None until they have loaded
    it.
    """

    def __init__(self, backend: RanksBackend, program: Program, table: StepTable, trace: bool) -> None:
        self._backend, self._program, self._table, self._traced = backend, program, table, trace
        self._begun = 0.0
        self.loaded: Loaded | None = None

    def wait(self) -> Output:
        """Wait until the launch ends, and return its output. Call this once. The output's `seconds` is the time from
        the start of the launch until this process noticed the end. Ctrl-C aborts the launch within a second.
        """
        try:
            self._finish()
        except BaseException:
            self.abort()
            raise
        self._backend._running = None
        seconds = time.perf_counter() - self._begun
        tokens, logprobs, logits = (array[: self._program.dims.logit_rows] for array in self._results())
        return Output(tokens, logprobs, logits, seconds, self._trace() if self._traced else None)

    def abort(self) -> None:
        """Stop the launch soon and return when it has stopped; its output is lost. Does nothing if the launch
        has ended.
        """
        if self._backend._running is not self:
            return
        try:
            self._stop()
        finally:
            self._backend._running = None

    def _trace(self) -> Trace:
        assert self.loaded is not None
        intervals, dropped, clock_error_s = self._intervals()
        header = TraceHeader(
            program=self.loaded.hash,
            source="cpu",
            tick_s=1e-9,
            read_s=native.clock_cost(),
            clock_error_s=clock_error_s,
            dropped=dropped,
        )
        return Trace(header, intervals, slot_work(self._table)[None])

    def begin(self) -> None:
        """Load the program and start all ranks."""
        self._load()
        self._begun = time.perf_counter()
        self._go()

    @abstractmethod
    def _load(self) -> None:
        """Set `loaded`."""

    @abstractmethod
    def _go(self) -> None:
        """Start the loaded program on every rank."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait until every rank has finished. Raises MegakernelError if a rank cannot continue."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop the launch on all ranks, and wait until no rank runs any more, so that the backend can launch again."""

    @abstractmethod
    def _results(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the tokens, log-probabilities and logits. The arrays may have more rows than the program has logit
        rows.
        """

    @abstractmethod
    def _intervals(self) -> tuple[Intervals, int, float]:
        """Return three values: the intervals sorted by rank, worker and begin; the number of
        intervals that did not fit into the trace; the seconds by which ranks' clocks may differ.
        """
