"""The maximum rates (ceilings) of a machine: reading memory, multiply-adds, and sending to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated

import msgspec

from ..machine import Machine, busy

# Each rate is the best of a few measurements. They are short, because a user waits; longer ones find the same rates.
_REPEATS = 3
_PROBE_S, _IN_CORE_S = 0.1, 0.03  # of memory; of caches and arithmetic, whose passes are a few milliseconds at most
_CACHE_FACTOR = 8  # read so many times the last-level cache's size, so that reads come from memory
_UNKNOWN_CACHE = 32 << 20
# The maximum number of bytes to read, because some virtual machines report the cache of a whole socket.
_LARGEST_READ = 2 << 30
# The bytes that each thread reads to measure the last-level cache. They do not fit a core's own caches. If the
# last-level cache is small, threads read less.
_IN_CACHE = 8 << 20
QUIET = 0.05  # a measurement is valid if other programs use at most this fraction of all cores' time


@dataclass(frozen=True)
class Ceilings:
    """The maximum rates of all workers together, with which measured rates are compared."""

    read_bytes_per_s: float
    flops: float  # multiply-adds per second, counted as two operations each
    threads: int
    how: str  # where the rates come from
    link_bytes_per_s: float | None = None  # rate at which a rank sends to other ranks; None if ranks share one memory
    cache_bytes_per_s: float | None = None  # the rate of the last-level cache; None if it was not measured
    warning: str | None = None  # why the rates may be too low
    integer_ops: float | None = None  # operations/s on 8-bit integers; None if not measured
    vector_flops: float | None = None  # FLOP/s outside matmuls; None if it equals `flops`
    unit: str = "FLOP/s"  # of `flops`

    @property
    def of_integers(self) -> Ceilings:
        """The ceilings for steps that multiply quantised weights in integers, and do all else in floats."""
        if self.integer_ops is None:
            return self
        return replace(self, flops=self.integer_ops, vector_flops=self.flops, unit="OP/s")


# Stored rates outside these limits are ignored. Otherwise a wrong rate might stay forever: only a higher one replaces
# it.
_Rate = Annotated[float, msgspec.Meta(gt=1, lt=1e18)]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest rates ever measured on this CPU with `threads` threads."""

    threads: int
    read_bytes_per_s: _Rate
    cache_bytes_per_s: _Rate
    flops: _Rate
    integer_ops: _Rate
    # The fraction of all cores' time that other programs used during the least disturbed measurement, if it is known.
    others: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d$")]  # of the last measurement
    probes: Annotated[int, msgspec.Meta(ge=1)] = 1  # measurements

    @property
    def quiet(self) -> bool:
        return self.others is None or self.others <= QUIET

    def better(self, earlier: Measured | None) -> Measured:
        """Combine two measurements: keep the higher value of each rate, because other programs can only lower it."""
        if earlier is None:
            return self
        rates = ("read_bytes_per_s", "cache_bytes_per_s", "flops", "integer_ops")
        best = {name: max(getattr(self, name), getattr(earlier, name)) for name in rates}
        others = min((one.others for one in (self, earlier) if one.others is not None), default=None)
        return msgspec.structs.replace(self, **best, others=others, probes=self.probes + earlier.probes)

    @property
    def ceilings(self) -> Ceilings:
        times = "once" if self.probes == 1 else f"{self.probes} times"
        warning = (
            f"other programs used {self.others or 0:.0%} of this machine's cores in the quietest measurement of its"
            " highest speeds, so the limits may be too low: run megakernel doctor when the machine is idle"
        )
        return Ceilings(
            self.read_bytes_per_s,
            self.flops,
            self.threads,
            f"the best that was measured here, {times} until {self.date}",
            cache_bytes_per_s=self.cache_bytes_per_s,
            warning=None if self.quiet else warning,
            integer_ops=self.integer_ops,
        )


ReadProbe = Callable[[int, int, float], float]  # (threads, bytes in total, approximate seconds) -> bytes/s
FmaProbe = Callable[[int, float], float]  # (threads, seconds) -> FLOP/s of multiply-adds in registers, or integer ops/s


def read_rate(threads: int, read: ReadProbe) -> float:
    """Return the bytes per second that `threads` threads can read from memory now. The rate may vary."""
    return read(threads, min(_CACHE_FACTOR * last_level_cache(), _LARGEST_READ), _PROBE_S)


def measure(threads: int, read: ReadProbe, fma: FmaProbe, integers: FmaProbe) -> Measured:
    """Measure this machine's maximum rates with `threads` threads. Each rate is the best of several measurements."""
    inside = min(_IN_CACHE * threads, last_level_cache() // 2)
    begin = busy.now()
    return Measured(
        threads,
        max(read_rate(threads, read) for _ in range(_REPEATS)),
        max(read(threads, inside, _IN_CORE_S) for _ in range(_REPEATS)),
        max(fma(threads, _IN_CORE_S) for _ in range(_REPEATS)),
        max(integers(threads, _IN_CORE_S) for _ in range(_REPEATS)),
        busy.others(begin, busy.now()),
        date.today().isoformat(),
    )


def machine_ceilings(machine: Machine, devices: int = 1) -> Ceilings:
    """Return the datasheet rates of `devices` devices of this kind together, and the rate at which each of them
    sends. For `host`, all these rates are rough estimates."""
    return Ceilings(
        devices * machine.memory_bytes_per_s,
        devices * machine.matrix_flops,
        devices * machine.workers,
        f"datasheet: {machine.name}",
        machine.link_bytes_per_s,
        devices * machine.cache_bytes_per_s or None,
    )


def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size in bytes of the largest cache that Linux reports for core 0, or a typical size if it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for file in root.glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
        except (OSError, ValueError, IndexError):
            continue
    return max(sizes, default=_UNKNOWN_CACHE)
