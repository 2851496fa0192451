"""The measured ceilings of this machine's CPU, through the native library's probes."""

from __future__ import annotations

from ..roofline import Ceilings, measure_ceilings
from ..runtime.native import probe_fma, probe_read


def host_ceilings(threads: int) -> Ceilings:
    """Read bandwidth and float32 multiply-add rate of `threads` threads, measured now (about two seconds)."""
    return measure_ceilings(threads, probe_read, probe_fma)
