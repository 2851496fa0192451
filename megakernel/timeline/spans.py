"""Sets of disjoint half-open intervals on one integer line.

Lanes are laid end to end on the line (position = lane * period + tick), so one array operation handles all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Sorted, disjoint, non-empty intervals [begin, end); int64 arrays of equal length."""

    begin: Ticks
    end: Ticks

    @staticmethod
    def union(begin: Ticks, end: Ticks) -> Spans:
        """The union of any intervals; empty ones are dropped."""
        some = end > begin
        begin, end = begin[some], end[some]
        order = np.argsort(begin, kind="stable")
        begin, reach = begin[order], np.maximum.accumulate(end[order])
        first = np.ones(len(begin), dtype=bool)
        first[1:] = begin[1:] > reach[:-1]
        last = np.roll(first, -1)
        return Spans(begin[first], reach[last])

    def covered(self, begin: Ticks, end: Ticks) -> Ticks:
        """The ticks of this set inside each [begin, end)."""
        before = np.concatenate([[0], np.cumsum(self.end - self.begin)])

        def below(at: Ticks) -> Ticks:
            i = np.searchsorted(self.begin, at, side="right")
            over = np.maximum(self.end[i - 1] - at, 0) if len(self.end) else np.zeros_like(at)
            return before[i] - np.where(i > 0, over, 0)

        inside: Ticks = below(np.maximum(begin, end)) - below(begin)
        return inside

    def total(self) -> int:
        return int((self.end - self.begin).sum())

    def without(self, begin: Ticks, end: Ticks) -> Spans:
        """This set minus the given intervals, which must be disjoint and lie inside it."""
        starts = np.sort(np.concatenate([self.begin, end]), kind="stable")
        stops = np.sort(np.concatenate([self.end, begin]), kind="stable")
        some = stops > starts
        return Spans(starts[some], stops[some])

    def moments(self, period: int) -> tuple[Ticks, Ticks]:
        """All begins and all ends as ticks on one common axis, instead of lanes end to end."""
        return self.begin % period, self.end % period


def active(groups: list[tuple[Ticks, Ticks]]) -> tuple[Ticks, list[Ticks]]:
    """Cut time at every begin and end: the lengths of the pieces, and how many intervals of each group cover
    each piece.
    """
    edges = np.unique(np.concatenate([moments for group in groups for moments in group]))
    counts = []
    for begin, end in groups:
        change = np.zeros(len(edges), dtype=np.int64)
        np.add.at(change, np.searchsorted(edges, begin), 1)
        np.add.at(change, np.searchsorted(edges, end), -1)
        counts.append(np.cumsum(change)[:-1])
    return np.diff(edges), counts


def disjoint(begin: Ticks, end: Ticks, what: Ticks) -> tuple[Ticks, Ticks, Ticks]:
    """The intervals in order of begin, each cut to the part that earlier ones do not cover; empty ones are dropped."""
    order = np.argsort(begin, kind="stable")
    begin, end, what = begin[order], end[order], what[order]
    reach = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], reach[:-1])
    some = end > begin
    return begin[some], end[some], what[some]


def overlaps(begin: Ticks, end: Ticks, others: Spans) -> tuple[Ticks, Ticks, Ticks, Ticks]:
    """The intersections of the given intervals (disjoint, in order) with `others`: begin, end, the index in each."""
    first = np.searchsorted(others.end, begin, side="right")
    count = np.maximum(np.searchsorted(others.begin, end, side="left") - first, 0)
    at = np.repeat(np.arange(len(begin)), count)
    other = first[at] + np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
    return np.maximum(begin[at], others.begin[other]), np.minimum(end[at], others.end[other]), at, other
