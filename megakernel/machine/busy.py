"""Measures which fraction of this machine's cores other programs use, to judge whether a speed measurement is valid."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # positions of `idle` and `iowait` in the first line of /proc/stat
_COLUMNS = 8  # time columns to add up; the guest columns after them are already part of user time


@dataclass(frozen=True)
class Moment:
    """CPU seconds since the system started: the time of all cores, how much of it was idle, and this process's time."""

    total_s: float
    idle_s: float
    own_s: float


def now(stat: Path = _STAT) -> Moment | None:
    """Return the CPU times at this moment, or None if the system does not report them."""
    try:
        name, *columns = stat.read_text().splitlines()[0].split()
        ticks = [int(column) for column in columns[:_COLUMNS]]
    except (OSError, ValueError, IndexError):
        return None
    if name != "cpu" or len(ticks) < _COLUMNS:
        return None
    second = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return Moment(sum(ticks) / second, sum(ticks[i] for i in _IDLE) / second, own.user + own.system)


def others(begin: Moment | None, end: Moment | None) -> float | None:
    """Return the fraction of all cores' time that other programs and virtual machines used between `begin` and `end`,
    or None if it is unknown."""
    if begin is None or end is None or end.total_s <= begin.total_s:
        return None
    mine = end.idle_s - begin.idle_s + end.own_s - begin.own_s
    return min(1.0, max(0.0, 1.0 - mine / (end.total_s - begin.total_s)))
