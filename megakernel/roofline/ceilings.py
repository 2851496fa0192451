"""The ceilings of a machine: how fast it reads memory, multiplies and adds, and sends to its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..machine import Machine

_REPEATS = 3
_PROBE_S = 0.25
_CACHE_FACTOR = 8  # a read must miss: the probe covers so many times the last-level cache
_UNKNOWN_CACHE = 32 << 20
_LARGEST_READ = 2 << 30  # some virtual machines report the cache of a whole socket


@dataclass(frozen=True)
class Ceilings:
    """Rates of all workers together. `how` says where they come from, for people."""

    read_bytes_per_s: float
    flops: float  # a multiply-add counts as two
    threads: int
    how: str
    link_bytes_per_s: float | None = None  # of each rank to its peers; None: ranks share one memory


ReadProbe = Callable[[int, int, float], float]  # (threads, bytes in all, about how many seconds) -> bytes/s
FmaProbe = Callable[[int], float]  # (threads) -> FLOP/s of independent multiply-adds from registers


def measure_ceilings(threads: int, read: ReadProbe, fma: FmaProbe) -> Ceilings:
    """This machine's own: the best of several all-worker probes, since anything else on the machine only slows one."""
    size = min(_CACHE_FACTOR * last_level_cache(), _LARGEST_READ)
    return Ceilings(
        read_bytes_per_s=max(read(threads, size, _PROBE_S) for _ in range(_REPEATS)),
        flops=max(fma(threads) for _ in range(_REPEATS)),
        threads=threads,
        how=f"measured: best of {_REPEATS}, reads over {size >> 20} MiB",
    )


def machine_ceilings(machine: Machine) -> Ceilings:
    """The datasheet's (for `host`, nominal) rates."""
    return Ceilings(
        machine.memory_bytes_per_s,
        machine.matrix_flops,
        machine.workers,
        f"datasheet: {machine.name}",
        machine.link_bytes_per_s,
    )


def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that Linux reports for core 0; a common size where it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for file in root.glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
        except (OSError, ValueError, IndexError):
            continue
    return max(sizes, default=_UNKNOWN_CACHE)
