"""A fake CuPy for tests of benchmarks/speed/probe_gpu.py, with only the functions that this script needs. Arrays are
NumPy arrays, kernels write made-up measurements, and any two events are 1 ms apart."""

from typing import Any
from unittest.mock import Mock

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


def _hand_off(counters: Any, partner: int, rounds: int, load: Any, n: int, sink: Any, out: Any) -> None:
    ns = int(rounds) * ROUND_TRIP_NS
    out[:] = ns, ns * int(n > 0), 0, 0, partner


def _timers(out: Any, n: int) -> None:
    out[:n] = 32
    out[n:] = 256 * 36, 256 * 40, _CYCLES_NS * 20_000_000, 20_000_000, 1


def RawModule(code: str, options: tuple[str, ...]) -> Any:
    """Return a stand-in for a module of kernels, whose names must occur in the source. A kernel does nothing unless the
    script evaluates what it writes."""

    def get_function(name: str) -> Mock:
        def run(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], **_: Any) -> None:
            assert 0 < block[0] <= 1024 and grid[0] > 0
            {"hand_off": _hand_off, "timers": _timers}.get(name, Mock())(*arguments)

        assert f" {name}(" in code, name
        return Mock(side_effect=run)

    return Mock(get_function=get_function)


cuda = Mock(get_elapsed_time=lambda start, end: 1.0)
__version__ = "pretended"
