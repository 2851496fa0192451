"""Explains why a step takes longer than the least possible time. All further time is divided exactly among causes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ..isa import MAX_PHASES
from ..targets.issue import issued, own_paths
from ..trace import IntervalKind
from .resolve import Resolved
from .resources import ROOFLINE, Resource
from .spans import Floats, Ints, Mask
from .states import LanePlace, Pieces, State, longest, ranked

FAR = 8  # outliers take more than this many times the median of their phase


@dataclass(frozen=True)
class Outliers:
    """The COMPUTE intervals that took far longer than others of their phase, for example because the system interrupted
    them. `chosen` is a mask of them: they are longer than FAR * median. `median` is indexed by phase number and has the
    median COMPUTE time in ticks (0 if none). `beyond` has each interval's length minus its phase's median."""

    median: Floats
    beyond: Floats
    chosen: Mask


def outliers(resolved: Resolved) -> Outliers:
    compute = resolved.kind(IntervalKind.COMPUTE)
    length, number = resolved.length[compute], resolved.number[compute]
    median = np.zeros(MAX_PHASES + 1)
    for one in np.unique(number):
        median[one] = np.median(length[number == one])
    usual = median[resolved.number]
    return Outliers(median, resolved.length - usual, compute & (resolved.length > FAR * usual) & (usual > 0))


class Cause(StrEnum):
    """The kinds of bars in a waterfall."""

    LEAST = "least"  # the step's least time, at the peak rate of the resource that limits it
    RESOURCE = "resource"  # the further time that loads from the cache, or issuing instructions, need
    WORK = "work"
    WAIT = "wait"
    IDLE = "idle"


@dataclass(frozen=True)
class Bar:
    """One cause, and the seconds of a step that it takes. `places` has the longest periods with this cause."""

    name: str
    kind: Cause
    seconds: float
    places: list[LanePlace]


@dataclass(frozen=True)
class Waterfall:
    """A step's time, divided by cause. The `bars` add up to the step. `least_s` is the least time that the step needs
    at peak rates, and `bound` names the resource that determines it. `times` has the seconds that each resource needs
    at its peak rate, on the rank that uses it most. Its entry "issue" is the time in which a worker's busiest kind of
    warp issues machine instructions, as the mean over the busiest rank's workers. If `beyond` is true, the least time
    exceeds the step's time. Then the machine file or the clock is wrong, and the first bar is the whole step."""

    least_s: float
    bound: str
    beyond: bool
    times: dict[str, float]
    bars: list[Bar]


def waterfall(
    resolved: Resolved, pieces: Pieces, used: list[Resource], causes: Ints, names: list[str], outliers: Outliers
) -> Waterfall:
    """Divide the step of an average worker among causes. `used` is the result of `resources`. `causes` has an entry per
    piece of time: for a wait, an index into `names`, otherwise -1.

    The time in which the worker computes is divided into these bars, in this order:

    - the least time, at the peak rate of the resource that limits the step
    - the further time that loads from the cache need, then the further time to issue instructions
    - the excess of outliers (intervals that took unusually long) over their phase's median
    - the rest, in which work is slower than all these limits

    All other time (stores, loads, waits, idle time) has one bar per cause. The least time can exceed the computing
    time, if loads or sends continue while workers wait. Then the other bars are scaled down, so that all add up to the
    step.
    """
    tick, step, lanes = resolved.tick_s, resolved.step_s, resolved.lanes * resolved.launches
    times = {r.name: max(r.ranks) * step for r in used}
    limits = [(t, name) for name, t in times.items() if name in ROOFLINE]
    least, bound = max(limits, default=(0.0, "nothing"))
    at_least = min(least, step)
    compute = pieces.of(State.COMPUTE)
    rows = np.flatnonzero(resolved.kind(IntervalKind.COMPUTE))
    bars = [Bar(bound, Cause.LEAST, at_least, ranked(resolved, rows, resolved.length[rows].astype(np.float64)))]
    reached = at_least
    issue, busiest = _issue(resolved, rows)
    if busiest > 0:
        times["issue"] = busiest
    for name, needed in times.items():
        if name not in ROOFLINE and min(needed, step) > reached:
            places = ranked(resolved, rows, issue) if name == "issue" else bars[0].places
            bars.append(Bar(name, Cause.RESOURCE, min(needed, step) - reached, places))
            reached = min(needed, step)

    def mean_s(chosen: Mask) -> float:
        return float(pieces.length[chosen].sum()) / lanes * tick

    computed = mean_s(compute)
    if computed > reached:
        slower, far = outliers.beyond[rows], outliers.chosen[rows]
        beyond = min(float(slower[far].sum()) / lanes * tick, computed - reached)
        if beyond > 0:
            bars.append(Bar("outliers", Cause.WORK, beyond, ranked(resolved, rows[far], slower[far])))
        places = ranked(resolved, rows[~far], slower[~far])
        bars.append(Bar("work slower than its limits", Cause.WORK, computed - reached - beyond, places))
    others = [("stores", Cause.WORK, pieces.of(State.STORE)), ("loads", Cause.WORK, pieces.of(State.LOAD))]
    waits = [(f"waits for {name}", Cause.WAIT, causes == number) for number, name in enumerate(names)]
    waits.sort(key=lambda wait: -int(pieces.length[wait[2]].sum()))
    idle = [("imbalance", State.END), ("dispatch and gaps", State.IDLE)]
    others += [*waits, *((name, Cause.IDLE, pieces.of(state)) for name, state in idle)]
    beside = step - computed
    part = (step - max(reached, computed)) / beside if beside > 0 else 0.0
    bars += [Bar(n, kind, part * mean_s(c), longest(resolved, pieces, c)) for n, kind, c in others if c.any()]
    return Waterfall(least, bound, least > step, times, bars)


def _issue(resolved: Resolved, rows: Ints) -> tuple[Floats, float]:
    """Return how many seconds the busiest kind of warp needs to issue machine instructions: for each interval (`rows`
    are their indices), and per launch on the busiest rank, as the mean over that rank's workers."""
    found, paths = np.zeros((len(resolved.records), 3)), resolved.machine.paths
    for phase, dims, records, columns in resolved.program.by_phase():
        roles = issued(phase, columns, dims, own_paths(dims, paths)) if paths else None
        if roles is not None:
            found[records] = np.stack([roles.weight_loader, roles.input_loader, roles.consumers], axis=1)
    seconds = found[resolved.record[rows]]
    once = np.unique(resolved.instance[rows], return_index=True)[1]  # an instruction may have several intervals
    rank = resolved.rows["rank"][rows[once]]
    of_ranks = [np.bincount(rank, role[once], minlength=1) for role in seconds.T]
    workers = resolved.program.workers * resolved.launches
    return seconds.max(axis=1), float(np.max(of_ranks)) / workers
