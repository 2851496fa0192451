"""Determines what each worker (SM or core) does at each moment: the basis of busy, waiting and idle times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..trace import IntervalKind, Role
from .resolve import Resolved
from .spans import Floats, Ints, Mask, Spans, disjoint, overlaps

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


def pieces(resolved: Resolved) -> Pieces:
    """Divide the workers' time into pieces with one state each. Where several states apply, the first one counts."""
    period = resolved.period
    base = resolved.lane * period
    first, last = resolved.launch_spans
    starts = (np.arange(resolved.lanes) * period)[:, None]
    free = Spans.union((starts + first).ravel(), (starts + last).ravel())
    parts = []
    for state, chosen in _states(resolved):
        i = np.flatnonzero(chosen)
        begin, end, i = disjoint(base[i] + resolved.begin[i], base[i] + resolved.end[i], i)
        begin, end, at, _ = overlaps(begin, end, free)
        parts.append((begin, end, np.full(len(begin), state, np.int8), i[at]))
        free = free.without(begin, end)
    parts.append((free.begin, free.end, _idle(resolved, free), np.full(len(free.begin), -1)))
    begin, end, states, interval = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    lane = begin // period
    return Pieces(lane, begin - lane * period, end - lane * period, states[order], interval[order])


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


def _idle(resolved: Resolved, free: Spans) -> NDArray[np.int8]:
    """Return IDLE or END for each span of time in `free`, in which no interval is recorded."""
    lane = free.begin // resolved.period
    begin = free.begin - lane * resolved.period
    launch = np.searchsorted(resolved.launch_spans[0], begin, side="right") - 1
    latest = np.full(resolved.lanes * resolved.launches, -1)
    np.maximum.at(latest, resolved.lane * resolved.launches + resolved.launch, resolved.end)
    over = begin >= latest[lane * resolved.launches + launch]
    return np.where(over, State.END, State.IDLE).astype(np.int8)


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
    """Return the periods of those intervals in `rows` that have the largest values in `by`, the largest first."""
    chosen = rows[np.argsort(-by, kind="stable")[:_MOST_PLACES]]
    return [_place(resolved, resolved.lane[i], resolved.begin[i], resolved.end[i], i) for i in chosen.tolist()]


def _interval_at(pieces: Pieces, row: int) -> int:
    """Return the interval that contains a piece, or else the worker's next interval or previous one."""
    for at in (row, row + 1, row - 1):
        if 0 <= at < len(pieces.lane) and pieces.lane[at] == pieces.lane[row] and pieces.interval[at] >= 0:
            return int(pieces.interval[at])
    return -1


def _place(resolved: Resolved, lane: np.int64, begin: np.int64, end: np.int64, interval: int) -> LanePlace:
    rank, worker = divmod(int(lane), resolved.program.workers)
    return LanePlace(rank, worker, int(begin) * resolved.tick_s, int(end) * resolved.tick_s, interval)
