"""Runs a peer (another inference program) that is a Python library. The peer gets a process of its own, because its
threads, memory and crashes must not affect our process. A module with the functions `settings` and `load` wraps the
library (see `torch_llama`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.serving.bench.peers.contest import Settings, Task, Timed

_timer: Callable[[Timed, Settings], float]  # times a run of the peer; set only in the peer's own process


class Process:
    """A peer (a Python library for inference) in a process of its own. `module` is the Python module that wraps it."""

    def __init__(self, name: str, module: str, task: Task) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._module, self._task = module, task
        self._pool: ProcessPoolExecutor | None = None

    def settings(self, phase: Timed) -> tuple[Settings, list[Settings]]:
        made: tuple[Settings, list[Settings]] = import_module(self._module).settings(self._task, phase)
        return made

    def seconds(self, phase: Timed, settings: Settings) -> float:
        try:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_silence)
                self.about = self._pool.submit(_load, self._module, self._task).result()
            value = self._pool.submit(_time, phase, settings).result()
        except Exception as e:
            self.close()
            why = "the process that ran it ended" if isinstance(e, BrokenProcessPool) else f"{type(e).__name__}: {e}"
            raise MegakernelError(f"{self.name} failed: {why}") from e
        if not 0 < value < float("inf"):
            self.close()
            raise MegakernelError(f"{self.name} reported an invalid run time: {value!r} seconds")
        return value

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _silence() -> None:
    """Discard what the library prints, because it must not mix with our own output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _load(module: str, task: Task) -> dict[str, Any]:
    global _timer
    _timer, about = import_module(module).load(task)
    return dict(about)


def _time(phase: Timed, settings: Settings) -> float:
    return _timer(phase, settings)
