"""Measures how much of this machine's cores other programs use, so that a measurement can report its conditions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # the columns `idle` and `iowait` in the first line of /proc/stat
_COLUMNS = 8  # columns to add up; the guest columns after them are already part of user time


@dataclass(frozen=True)
class Moment:
    """CPU seconds since the system started: the total and the idle time of all cores, and the time of this process."""

    total_s: float
    idle_s: float
    own_s: float


def now(stat: Path = _STAT) -> Moment | None:
    """The counters now; None if the system does not provide them."""
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
    """The fraction of all cores' time that other programs and virtual machines used in between; None if unknown."""
    if begin is None or end is None or end.total_s <= begin.total_s:
        return None
    mine = end.idle_s - begin.idle_s + end.own_s - begin.own_s
    return min(1.0, max(0.0, 1.0 - mine / (end.total_s - begin.total_s)))
