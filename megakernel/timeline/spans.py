"""Sets of disjoint half-open intervals of integers. A time of a lane (worker) is the integer lane * period + tick."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Spans:
    """A set of sorted, disjoint, non-empty intervals [begin, end)."""

    begin: Ints
    end: Ints

    @staticmethod
    def union(begin: Ints, end: Ints) -> Spans:
        """Return the union of intervals, which may overlap and be in any order."""
        some = end > begin
        begin, end = begin[some], end[some]
        order = np.argsort(begin, kind="stable")
        begin, reach = begin[order], np.maximum.accumulate(end[order])
        first = np.ones(len(begin), dtype=bool)
        first[1:] = begin[1:] > reach[:-1]
        last = np.roll(first, -1)
        return Spans(begin[first], reach[last])

    def covered(self, begin: Ints, end: Ints) -> Ints:
        """Return how many ticks of each interval [begin, end) are in this set."""
        before = np.concatenate([[0], np.cumsum(self.end - self.begin)])

        def below(at: Ints) -> Ints:
            i = np.searchsorted(self.begin, at, side="right")
            over = np.maximum(self.end[i - 1] - at, 0) if len(self.end) else np.zeros_like(at)
            return before[i] - np.where(i > 0, over, 0)

        inside: Ints = below(np.maximum(begin, end)) - below(begin)
        return inside

    def total(self) -> int:
        return int((self.end - self.begin).sum())


def active(groups: list[Spans], period: int) -> tuple[Ints, list[Ints]]:
    """Count how many lanes (workers) are active at each time. Time is divided wherever an interval of any group begins
    or ends. Return the length of each such period, and for each group the number of lanes that are active in it."""
    moments = [(group.begin % period, group.end % period) for group in groups]
    edges = np.unique(np.concatenate([times for pair in moments for times in pair]))
    counts = []
    for begin, end in moments:
        change = np.zeros(len(edges), dtype=np.int64)
        np.add.at(change, np.searchsorted(edges, begin), 1)
        np.add.at(change, np.searchsorted(edges, end), -1)
        counts.append(np.cumsum(change)[:-1])
    return np.diff(edges), counts
