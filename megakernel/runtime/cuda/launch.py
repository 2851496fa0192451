"""A launch under way on the GPUs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...errors import MegakernelError
from ...isa import StepTable
from ..backend import Output
from .loaded import Loaded

if TYPE_CHECKING:
    from .backend import CudaBackend

_SPIN_S = 2e-3  # covers a step of decode; longer ones are polled with naps between
_NAP_S = 50e-6
_STOP_S = 5.0


class CudaLaunch:
    """Begun by its constructor. A backend has one at a time."""

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
        """Its outcome, once; `seconds` is the time until it was seen to end. Ctrl-C aborts it within a second."""
        try:
            while not self._loaded.answered():
                if time.perf_counter() - self._begin > _SPIN_S:
                    time.sleep(_NAP_S)
            seconds = time.perf_counter() - self._begin
        except MegakernelError:
            self._backend.lose()  # the driver itself has failed, and answers nothing else from now on
            raise
        except BaseException:
            self.abort()
            raise
        failure = self._loaded.failure()
        self._backend.ended(self._loaded, failed=failure is not None)
        if failure is not None:
            raise MegakernelError(f"the launch made no progress and was stopped: {failure}")
        return self._backend.outcome(self._loaded, seconds, traced=self._table if self.traced else None)

    def abort(self) -> None:
        """End it soon, and return when it has; its outcome is lost. Does nothing to a launch that has ended."""
        if self._backend.running is not self:
            return
        for grid in self._loaded.grids:
            grid.interrupt()
        limit = time.perf_counter() + _STOP_S
        while not self._loaded.idle():
            if time.perf_counter() > limit:
                raise MegakernelError("a launch does not stop: end the process")
            time.sleep(_NAP_S)
        self._backend.ended(self._loaded, failed=True)
