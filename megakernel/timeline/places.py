"""Finds the places in a trace that contribute most to a figure, where a user should look first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .resolve import Resolved
from .states import Pieces

_MOST = 12


@dataclass(frozen=True)
class Place:
    """A stretch of one worker's time, in seconds since the trace's first interval.

    `interval` is the index of the trace interval that contains the stretch. If nothing was recorded in the stretch,
    `interval` is the index of a neighbouring interval.
    """

    rank: int
    worker: int
    begin_s: float
    end_s: float
    interval: int


def longest(resolved: Resolved, pieces: Pieces, chosen: NDArray[np.bool_]) -> list[Place]:
    """Return the longest of the chosen pieces of time, at most _MOST, the longest first. Pieces of equal length are in
    the order of ranks and workers.
    """
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(-pieces.length[rows], kind="stable")[:_MOST]]
    return [_place(resolved, pieces, int(row)) for row in rows]


def ranked(resolved: Resolved, rows: NDArray[np.int64], by: NDArray[np.float64]) -> list[Place]:
    """Return the places of those intervals of `rows` that have the largest values in `by`, the largest first."""
    order = np.argsort(-by, kind="stable")[:_MOST]
    found = ((int(i), int(resolved.begin[i]), int(resolved.end[i])) for i in rows[order])
    return [_stretch(resolved, int(resolved.lane[i]), begin, end, i) for i, begin, end in found]


def _place(resolved: Resolved, pieces: Pieces, row: int) -> Place:
    lane, interval = int(pieces.lane[row]), int(pieces.interval[row])
    # A stretch without a recorded interval gets the index of the next interval of the same worker, or, at the end of a
    # step, of the previous one.
    for beside in (row + 1, row - 1):
        if interval < 0 and 0 <= beside < len(pieces.lane) and pieces.lane[beside] == lane:
            interval = int(pieces.interval[beside])
    return _stretch(resolved, lane, int(pieces.begin[row]), int(pieces.end[row]), interval)


def _stretch(resolved: Resolved, lane: int, begin: int, end: int, interval: int) -> Place:
    rank, worker = divmod(lane, resolved.program.workers)
    tick = resolved.trace.header.tick_s
    return Place(rank, worker, begin * tick, end * tick, interval)
