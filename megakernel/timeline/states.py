"""Determines what each worker (SM or core) does at each moment: the basis of busy, waiting and idle times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..isa.ragged import ragged
from ..trace import IntervalKind, Role
from .resolve import Resolved
from .spans import Floats, Ints, Mask

_MOST_PLACES = 12


class State(IntEnum):
    """What a worker does at a moment. If it does several things at once, the one that is first in this list counts."""

    COMPUTE = 0
    STORE = 1
    # A warp waits for a signal. If several warps wait, a consumer's wait counts, because it delays the arithmetic.
    WAIT = 2
    PAGE = 3  # a loader waits for a page
    LOAD = 4
    IDLE = 5  # nothing is recorded, or an instruction is being fetched
    END = 6  # like IDLE, after the worker's last interval of the step


BUSY = (State.COMPUTE, State.STORE, State.LOAD)
BLOCKED = (State.WAIT, State.PAGE)


@dataclass(frozen=True)
class Pieces:
    """The workers' time, divided into pieces in which a worker has one state, such as computing or waiting. Pieces
    cover every launch of every worker, and are sorted by (lane, begin). `begin` and `end` are in ticks, as in
    `Resolved`. `interval` is the interval that contains the piece; -1 if the worker is idle."""

    lane: Ints
    begin: Ints
    end: Ints
    state: NDArray[np.int8]
    interval: Ints

    @property
    def length(self) -> Ints:
        return self.end - self.begin

    def of(self, *states: State) -> Mask:
        chosen: Mask = np.isin(self.state, states)
        return chosen

    def per_lane(self, lanes: int, *states: State) -> Ints:
        """Return the number of ticks that each lane (worker) spends in any of these states."""
        here = self.of(*states)
        return np.bincount(self.lane[here], self.length[here], minlength=lanes).astype(np.int64)


@lru_cache(maxsize=2)
def pieces(resolved: Resolved) -> Pieces:
    """Divide the workers' time into pieces with one state each. If several apply, the first in `State` counts."""
    period, launches, every = resolved.period, resolved.launches, np.arange(resolved.lanes)
    base = resolved.lane * period
    begin, end = base + resolved.begin, base + resolved.end
    # For each launch of each lane: its begin, its end, and the end of the lane's last interval in it.
    first, last = ((every[:, None] * period + edge).ravel() for edge in resolved.launch_spans)
    late = first.copy()
    np.maximum.at(late, resolved.lane * launches + resolved.launch, end)
    edges = np.unique(np.concatenate([first, last, late, begin, end]))
    state, interval = np.full(len(edges), -1, np.int8), np.full(len(edges), -1)  # of the time after each edge

    def paint(value: State, begin: Ints, end: Ints, what: Ints) -> None:
        at = np.searchsorted(edges, begin)
        which, nth = ragged(np.searchsorted(edges, end) - at)
        state[at[which] + nth], interval[at[which] + nth] = value, what[which]

    paint(State.END, first, last, np.full(len(first), -1))
    paint(State.IDLE, first, late, np.full(len(first), -1))
    for value, chosen in reversed(_states(resolved)):
        i = np.flatnonzero(chosen)
        i = i[np.argsort(begin[i], kind="stable")[::-1]]  # of two that overlap, the one that begins first is kept
        paint(value, begin[i], end[i], i)
    at = np.flatnonzero(np.append(True, (np.diff(state) != 0) | (np.diff(interval) != 0)))
    at, following = at[:-1][state[at[:-1]] >= 0], at[1:][state[at[:-1]] >= 0]
    lane = edges[at] // period
    return Pieces(lane, edges[at] - lane * period, edges[following] - lane * period, state[at], interval[at])


def _states(resolved: Resolved) -> list[tuple[State, Mask]]:
    """Return each state with a mask of its intervals. If several states apply at a time, the first one counts."""
    waits = resolved.kind(IntervalKind.COUNTER_WAIT)
    consumers = resolved.rows["role"] == Role.CONSUMER
    return [
        (State.COMPUTE, resolved.kind(IntervalKind.COMPUTE)),
        (State.STORE, resolved.kind(IntervalKind.STORE)),
        (State.WAIT, waits & consumers),
        (State.WAIT, waits & ~consumers),
        (State.PAGE, resolved.kind(IntervalKind.PAGE_WAIT)),
        (State.LOAD, resolved.kind(IntervalKind.LOAD)),
    ]


@dataclass(frozen=True)
class LanePlace:
    """A period of a worker's time, in seconds since the first interval. `interval` contains it, or is next to it."""

    rank: int
    worker: int
    begin_s: float
    end_s: float
    interval: int


def longest(resolved: Resolved, pieces: Pieces, chosen: Mask) -> list[LanePlace]:
    """Return the longest of the pieces that the mask `chosen` selects, at most _MOST_PLACES, the longest first."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(-pieces.length[rows], kind="stable")[:_MOST_PLACES]]
    return [
        _place(resolved, pieces.lane[row], pieces.begin[row], pieces.end[row], _interval_at(pieces, row))
        for row in rows.tolist()
    ]


def ranked(resolved: Resolved, rows: Ints, by: Floats) -> list[LanePlace]:
    """Return the periods of the intervals `rows` with the largest values in `by`, largest first."""
    chosen = rows[np.argsort(-by, kind="stable")[:_MOST_PLACES]]
    return [_place(resolved, resolved.lane[i], resolved.begin[i], resolved.end[i], i) for i in chosen.tolist()]


def _interval_at(pieces: Pieces, row: int) -> int:
    """Return the interval that contains a piece. If there is none, return the worker's next or previous one, or -1."""
    for at in (row, row + 1, row - 1):
        if 0 <= at < len(pieces.lane) and pieces.lane[at] == pieces.lane[row] and pieces.interval[at] >= 0:
            return int(pieces.interval[at])
    return -1


def _place(resolved: Resolved, lane: np.int64, begin: np.int64, end: np.int64, interval: int) -> LanePlace:
    rank, worker = divmod(int(lane), resolved.program.workers)
    return LanePlace(rank, worker, int(begin) * resolved.tick_s, int(end) * resolved.tick_s, interval)
