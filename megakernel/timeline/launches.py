"""Compares several launches of one program: which one is typical, and how the others differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .summary import Summary


@dataclass(frozen=True)
class Difference:
    """The duration of one waterfall bar, in seconds, over several launches: its value in the median launch, its minimum
    and its maximum. `most_in` is the index of the launch with the maximum.
    """

    name: str
    median_s: float
    least_s: float
    most_s: float
    most_in: int


@dataclass(frozen=True)
class Launches:
    """The differences between several launches of one program. `step_s` has the duration of each launch's step, and
    `median` is the index of the launch with the median duration. `differences` are sorted by maximum minus minimum, the
    largest first.
    """

    step_s: list[float]
    median: int
    differences: list[Difference]


def compare_launches(summaries: Sequence[Summary]) -> Launches:
    """Compare several launches of one program. Each summary describes a trace of a single launch."""
    steps = [s.step_s for s in summaries]
    median = sorted(range(len(steps)), key=lambda n: steps[n])[len(steps) // 2]
    parts = [{bar.name: bar.seconds for bar in s.waterfall.bars} for s in summaries]
    found = []
    for name in dict.fromkeys(name for part in parts for name in part):
        each = [part.get(name, 0.0) for part in parts]
        most = max(range(len(each)), key=lambda n: each[n])
        found.append(Difference(name, each[median], min(each), each[most], most))
    return Launches(steps, median, sorted(found, key=lambda d: d.least_s - d.most_s))
