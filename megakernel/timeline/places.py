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

    `interval` is the trace row that contains it, or the neighbouring row if nothing was recorded there.
    """

    rank: int
    worker: int
    begin_s: float
    end_s: float
    interval: int


def longest(resolved: Resolved, pieces: Pieces, chosen: NDArray[np.bool_]) -> list[Place]:
    """The longest of the chosen stretches, longest first, ties by time."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(-pieces.length[rows], kind="stable")[:_MOST]]
    return [_place(resolved, pieces, int(row)) for row in rows]


def ranked(resolved: Resolved, rows: NDArray[np.int64], by: NDArray[np.float64]) -> list[Place]:
    """The intervals `rows` with the largest `by`, largest first."""
    order = np.argsort(-by, kind="stable")[:_MOST]
    found = ((int(i), int(resolved.begin[i]), int(resolved.end[i])) for i in rows[order])
    return [_stretch(resolved, int(resolved.lane[i]), begin, end, i) for i, begin, end in found]


def _place(resolved: Resolved, pieces: Pieces, row: int) -> Place:
    lane, interval = int(pieces.lane[row]), int(pieces.interval[row])
    # A gap belongs to the next interval of its worker, or, at the end of a step, to the previous one.
    for beside in (row + 1, row - 1):
        if interval < 0 and 0 <= beside < len(pieces.lane) and pieces.lane[beside] == lane:
            interval = int(pieces.interval[beside])
    return _stretch(resolved, lane, int(pieces.begin[row]), int(pieces.end[row]), interval)


def _stretch(resolved: Resolved, lane: int, begin: int, end: int, interval: int) -> Place:
    rank, worker = divmod(lane, resolved.program.workers)
    tick = resolved.trace.header.tick_s
    return Place(rank, worker, begin * tick, end * tick, interval)
