"""What each worker does at each moment of a step. All numbers about busy, waiting and idle time are based on this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..trace import IntervalKind, Role
from .resolve import Resolved
from .spans import Spans, Ticks, disjoint, overlaps


class State(IntEnum):
    """What a worker does at a moment. If it does several things at once, the first in this list counts."""

    COMPUTE = 0
    STORE = 1
    WAIT = 2  # for a signal; if several roles wait, the consumers' wait counts, because it delays the arithmetic
    PAGE = 3  # a loader waits for a page
    LOAD = 4
    IDLE = 5  # nothing was recorded, or an instruction was fetched
    END = 6  # like IDLE, but after the worker's last interval of the step


BUSY = (State.COMPUTE, State.STORE, State.LOAD)
BLOCKED = (State.WAIT, State.PAGE)


@dataclass(frozen=True)
class Pieces:
    """Disjoint pieces of the workers' time, which together cover every launch of every worker.

    The columns, in order of (lane, begin), are `lane`, `begin` and `end` in ticks as in `Resolved`, `state`, and
    `interval`, the interval that the piece belongs to (-1 in IDLE and END).
    """

    lane: NDArray[np.int64]
    begin: Ticks
    end: Ticks
    state: NDArray[np.int8]
    interval: NDArray[np.int64]

    @property
    def length(self) -> Ticks:
        return self.end - self.begin

    def of(self, *states: State) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = np.isin(self.state, states)
        return chosen

    def per_lane(self, lanes: int, *states: State) -> Ticks:
        """The ticks of each lane in any of the given states."""
        here = self.of(*states)
        return np.bincount(self.lane[here], self.length[here], minlength=lanes).astype(np.int64)


def pieces(resolved: Resolved) -> Pieces:
    """Divide the workers' time state by state: each state gets what earlier states have left."""
    period = resolved.period
    base = resolved.lane * period
    first, last = resolved.launch_spans()
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


def _states(resolved: Resolved) -> list[tuple[State, NDArray[np.bool_]]]:
    """The intervals of each state, in the order in which states take precedence where intervals overlap."""
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
    """IDLE or END for each span of `free`, in which no interval was recorded."""
    lane = free.begin // resolved.period
    begin = free.begin - lane * resolved.period
    launch = np.searchsorted(resolved.launch_spans()[0], begin, side="right") - 1
    latest = np.full(resolved.lanes * resolved.launches, -1)
    np.maximum.at(latest, resolved.lane * resolved.launches + resolved.launch, resolved.end)
    over = begin >= latest[lane * resolved.launches + launch]
    return np.where(over, State.END, State.IDLE).astype(np.int8)
