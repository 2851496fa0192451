"""A launch that runs on the GPUs, and how it ends: by itself, by an abort, or by giving up the GPUs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...errors import MegakernelError
from ...isa import StepTable
from ..backend import Output
from .loaded import Loaded

if TYPE_CHECKING:
    from .backend import CudaBackend

_SPIN_S = 2e-3  # poll without pauses for this long, which covers a decode step; then poll with pauses
_NAP_S = 50e-6
_STOP_S = 5.0
# The host gives up after this multiple of the time limit of the device's watchdog. The watchdog
# notices only waits, not an operation that never completes.
_PATIENCE = 4


class CudaLaunch:
    """A launch, which the constructor begins. A backend has at most one running launch."""

    def __init__(self, backend: CudaBackend, loaded: Loaded, table: StepTable, *, trace: bool) -> None:
        self.traced = trace
        self._backend, self._loaded, self._table = backend, loaded, table
        self._begin = time.perf_counter()
        try:
            backend.begin(loaded, table, self)
        except BaseException:
            self.abort()
            raise

    def wait(self) -> Output:
        """Wait until the launch ends, and return its output. Call it once. The output's `seconds` is
        the time from the start of the launch until the host noticed its end. Ctrl-C aborts the launch within a second.
        """
        try:
            ended = self._answered(_PATIENCE * self._backend.timeout_s)
            seconds = time.perf_counter() - self._begin
        except MegakernelError:
            self._backend.lose()  # the driver itself has failed and will not answer any more
            raise
        except BaseException:
            self.abort()
            raise
        if not ended:
            self._stop()
        failure = self._loaded.failure()
        self._backend.ended(self._loaded, failed=failure is not None)
        if failure is not None:
            raise MegakernelError(f"the launch made no progress and was stopped: {failure}")
        return self._backend.outcome(self._loaded, seconds, traced=self._table if self.traced else None)

    def abort(self) -> None:
        """Stop the launch soon and return when it has stopped; its output is lost. Does nothing if the launch has
        ended.

        Raises MegakernelError if the launch does not stop. In that case its GPUs can neither be used nor released.
        """
        if self._backend.running is not self:
            return
        self._stop()
        self._backend.ended(self._loaded, failed=True)

    def _answered(self, limit_s: float) -> bool:
        """Wait until the launch has ended, and return True. Return False if the launch has not ended
        `limit_s` seconds after its start.
        """
        while not self._loaded.answered():
            seconds = time.perf_counter() - self._begin
            if seconds > limit_s:
                return False
            if seconds > _SPIN_S:
                time.sleep(_NAP_S)
        return True

    def _stop(self) -> None:
        for grid in self._loaded.grids:
            grid.gpu.interrupt(grid.params.abort)
        limit = time.perf_counter() + _STOP_S
        while not self._loaded.idle():
            if time.perf_counter() > limit:
                raise self._lost()
            time.sleep(_NAP_S)

    def _lost(self) -> MegakernelError:
        """Give up the GPUs. The launch may still read and write all of its memory, so nothing is freed."""
        seconds, loaded = time.perf_counter() - self._begin, self._loaded
        try:
            waiting = loaded.waiting()
        except MegakernelError:
            waiting = None  # reading the watchdog's report failed too
        self._backend.lose()
        return MegakernelError(
            f"the GPU does not answer: launch {loaded.launches} of program {loaded.program.hash} has not ended after "
            f"{seconds:.0f} s and does not stop{f' ({waiting})' if waiting else ''}: end the process, "
            "nothing else frees the GPU's memory"
        )
