"""A fake CuPy for tests of benchmarks/speed/probe_gpu.py, with only the functions that this script needs. Arrays are
NumPy arrays, kernels write made-up measurements, and any two events are 1 ms apart."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy import int32, uint32, uint64  # noqa: F401

ROUND_TRIP_NS = 2000
_CYCLES_NS = 2


class Array(np.ndarray[Any, Any]):
    def get(self) -> Any:
        return np.asarray(self)


def zeros(shape: Any, dtype: Any) -> Array:
    return np.zeros(shape, dtype).view(Array)


empty = zeros


def _fill(out: Any, n: int) -> None:
    assert out.size == n


def _hand_off(counters: Any, partner: int, rounds: int, load: Any, n: int, sink: Any, out: Any) -> None:
    ns = int(rounds) * ROUND_TRIP_NS
    out[:] = ns, ns * int(n > 0), 0, 0, partner


def _timers(out: Any, n: int) -> None:
    out[:n] = 32
    out[n:] = 256 * 36, 256 * 40, _CYCLES_NS * 20_000_000, 20_000_000, 1


_KERNELS: dict[str, Callable[..., None]] = {"fill": _fill, "hand_off": _hand_off, "timers": _timers}


class RawModule:
    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self._code = code

    def get_function(self, name: str) -> Any:
        """Return a stand-in for a kernel, whose name must occur in the source. The stand-in does nothing unless the
        script evaluates what the kernel writes."""
        assert f" {name}(" in self._code, name
        body = _KERNELS.get(name, lambda *arguments: None)

        class Function:
            max_dynamic_shared_size_bytes = 0

            def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], **_: Any) -> None:
                assert 0 < block[0] <= 1024 and grid[0] > 0
                body(*arguments)

        return Function()


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


cuda = SimpleNamespace(Event=_Event, get_elapsed_time=lambda start, end: 1.0)
__version__ = "pretended"
