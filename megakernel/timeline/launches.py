"""Several launches of one program: which is the typical one, and in what the others differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .summary import Summary


@dataclass(frozen=True)
class Difference:
    """Seconds of one bar of the waterfall: in the median launch, the least and the most of all, and where the most."""

    name: str
    median_s: float
    least_s: float
    most_s: float
    most_in: int


@dataclass(frozen=True)
class Launches:
    """`step_s` in the order of the launches, `median` the place of the median one; greatest differences first."""

    step_s: list[float]
    median: int
    differences: list[Difference]


def compare_launches(summaries: Sequence[Summary]) -> Launches:
    """Of traces of one program, a launch each."""
    steps = [s.step_s for s in summaries]
    median = sorted(range(len(steps)), key=lambda n: steps[n])[len(steps) // 2]
    parts = [{bar.name: bar.seconds for bar in s.waterfall.bars} for s in summaries]
    found = []
    for name in dict.fromkeys(name for part in parts for name in part):
        each = [part.get(name, 0.0) for part in parts]
        most = max(range(len(each)), key=lambda n: each[n])
        found.append(Difference(name, each[median], min(each), each[most], most))
    return Launches(steps, median, sorted(found, key=lambda d: d.least_s - d.most_s))
