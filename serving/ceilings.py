"""The measured ceilings of this machine's CPU, through the native library's probes."""

from __future__ import annotations

from ..roofline import Ceilings, measure_ceilings
from ..runtime import native


class _NativeProbes:
    """`roofline.Probes` with the code path that the CPU backend uses."""

    def read(self, threads: int, size: int, seconds: float) -> float:
        return native.probe_read(threads, size, seconds)

    def fma(self, threads: int) -> float:
        return native.probe_fma(threads)


def host_ceilings(threads: int) -> Ceilings:
    """Read bandwidth and float32 multiply-add rate of `threads` threads, measured now (about two seconds)."""
    return measure_ceilings(_NativeProbes(), threads)
