"""Summarises a trace in one object that JSON can represent. The terminal table, the HTML page and `--json` show it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..isa import MAX_PHASES
from ..trace import IntervalKind
from .critical import CriticalPath, critical_path
from .overlap import Overlap, exposed_communication, overlap
from .resolve import WORK, Resolved
from .resources import Resource, resources
from .spans import Ints
from .states import BLOCKED, BUSY, LanePlace, Pieces, State, longest, pieces
from .waterfall import Outliers, Waterfall, outliers, waterfall


@dataclass(frozen=True)
class WorkerTimes:
    """The fractions of the step in which one worker is busy, waits, and is idle, as defined in `Summary`."""

    rank: int
    worker: int
    busy: float
    wait: float
    idle: float


@dataclass(frozen=True)
class PhaseTime:
    """The time that all workers spend on computing and storing one phase. `share` is the phase's fraction of this time
    over all phases. `median_s` is the median length of the phase's COMPUTE intervals. Outliers are intervals longer
    than FAR * `median_s`: `outliers` is their number, and `outliers_s` the sum of their time beyond `median_s`."""

    name: str
    family: str
    count: int
    total_s: float
    share: float
    median_s: float
    outliers: int
    outliers_s: float


@dataclass(frozen=True)
class WaitTime:
    """The waits of one phase, `instruction`, for one cause. `cause` names the phases that signal the awaited counter.
    Of several counters, the last one to be complete counts. Only time in which the worker did nothing else counts.
    `count` is the number of waits, `share` their fraction of all waiting time, and `places` has the longest ones."""

    instruction: str
    cause: str
    count: int
    total_s: float
    share: float
    places: list[LanePlace]


@dataclass(frozen=True)
class Summary:
    """The figures of a trace over all its launches, except that the critical path is that of the last launch. Times are
    in seconds, and fractions are between 0 and 1.

    `step_s` is the mean time of a launch. `busy` and `wait` are mean fractions of a worker's time. A worker is busy
    when it computes, stores or loads. It waits when it needs a signal or a shared-memory page. Otherwise, it is idle
    (see states.py). `computing` is the fraction for computing alone. `imbalance` is (largest / mean busy time) - 1.

    `dropped` is the number of intervals for which the trace had no room. `clock_error_s` is the largest possible offset
    between the clocks of ranks. If `without_attention` is true, attention's work was not recorded, so it is missing in
    `resources`. All other fields are explained at the class or function that makes them.
    """

    step_s: float
    launches: int
    ranks: int
    workers: int
    intervals: int
    dropped: int
    clock_error_s: float
    source: str
    machine: str
    busy: float
    computing: float
    wait: float
    imbalance: float
    exposed_communication: float
    overlap: Overlap
    resources: list[Resource]
    without_attention: bool
    instructions: list[PhaseTime]
    waits: list[WaitTime]
    per_worker: list[WorkerTimes]
    critical_path: CriticalPath
    waterfall: Waterfall


def summarise(resolved: Resolved) -> Summary:
    """Return all figures of a trace."""
    program, header = resolved.program, resolved.trace.header
    found, far = pieces(resolved), outliers(resolved)
    workers = _workers(resolved, found)
    which, names = _blocked(resolved, found)
    busy = [w.busy for w in workers]
    mean = sum(busy) / len(busy)
    instructions, used = _instructions(resolved, far), resources(resolved)
    return Summary(
        step_s=resolved.step_s,
        launches=resolved.launches,
        ranks=program.ranks,
        workers=program.workers,
        intervals=len(resolved),
        dropped=header.dropped,
        clock_error_s=header.clock_error_s,
        source=header.source,
        machine=resolved.machine.name,
        busy=mean,
        computing=float(found.per_lane(resolved.lanes, State.COMPUTE).sum())
        / (max(resolved.steps, 1) * resolved.lanes),
        wait=sum(w.wait for w in workers) / len(workers),
        imbalance=max(busy) / mean - 1 if mean else 0.0,
        exposed_communication=exposed_communication(resolved),
        overlap=overlap(resolved),
        resources=used,
        without_attention=resolved.attention is None and len(resolved.of_attention) > 0,
        instructions=instructions,
        waits=_waits(resolved, found, which, names),
        per_worker=workers,
        critical_path=critical_path(resolved),
        waterfall=waterfall(resolved, found, used, which, names, far),
    )


def _workers(resolved: Resolved, found: Pieces) -> list[WorkerTimes]:
    busy, wait = (found.per_lane(resolved.lanes, *states) / max(resolved.steps, 1) for states in (BUSY, BLOCKED))
    return [
        WorkerTimes(*divmod(lane, resolved.program.workers), busy=float(b), wait=float(w), idle=float(1.0 - b - w))
        for lane, (b, w) in enumerate(zip(busy, wait, strict=True))
    ]


def _instructions(resolved: Resolved, far: Outliers) -> list[PhaseTime]:
    """Return the time of each phase, the longest first. In the order, outliers count with the median time."""
    work = resolved.kind(*WORK)
    ticks = np.bincount(resolved.number[work], resolved.length[work], minlength=MAX_PHASES + 1)
    executed = np.unique(resolved.instance[work], return_index=True)[1]
    counts = np.bincount(resolved.number[work][executed], minlength=MAX_PHASES + 1)
    slow, late = resolved.number[far.chosen], far.beyond[far.chosen]
    many, beyond = np.bincount(slow, minlength=MAX_PHASES + 1), np.bincount(slow, late, minlength=MAX_PHASES + 1)
    tick, total = resolved.tick_s, max(float(ticks.sum()), 1.0)
    found = [
        PhaseTime(
            name=phase.name,
            family=phase.family.name.lower(),
            count=int(counts[n]),
            total_s=float(ticks[n]) * tick,
            share=float(ticks[n]) / total,
            median_s=float(far.median[n]) * tick,
            outliers=int(many[n]),
            outliers_s=float(beyond[n]) * tick,
        )
        for n, phase in resolved.program.forward.by_number.items()
        if counts[n]
    ]
    return sorted(found, key=lambda item: item.outliers_s - item.total_s)


def _blocked(resolved: Resolved, found: Pieces) -> tuple[Ints, list[str]]:
    """Return the cause of the wait in each piece of time (-1: no wait). It is an index into the second result."""
    names = [*resolved.causes.names, "a page", "a signal of no phase"]
    of_interval = resolved.cause.copy()
    of_interval[of_interval < 0] = len(names) - 1
    of_interval[resolved.kind(IntervalKind.PAGE_WAIT)] = len(names) - 2
    which = np.full(len(found.state), -1, dtype=np.int64)
    here = found.of(*BLOCKED)
    which[here] = of_interval[found.interval[here]]
    return which, names


def _waits(resolved: Resolved, found: Pieces, which: Ints, names: list[str]) -> list[WaitTime]:
    chosen = np.flatnonzero(which >= 0)
    total = max(int(found.length[chosen].sum()), 1)
    interval = found.interval[chosen]
    pairs, at = np.unique(np.stack([resolved.number[interval], which[chosen]]), axis=1, return_inverse=True)
    ticks = np.bincount(at.ravel(), found.length[chosen], minlength=pairs.shape[1])
    # A wait that work of another warp divides into several pieces still counts as one wait.
    first = np.unique(interval, return_index=True)[1]
    counts = np.bincount(at.ravel()[first], minlength=pairs.shape[1])
    waits = []
    for n, (number, name) in enumerate(pairs.T.tolist()):
        mine = np.zeros(len(which), dtype=bool)
        mine[chosen[at.ravel() == n]] = True
        waits.append(
            WaitTime(
                instruction=resolved.program.forward.by_number[number].name,
                cause=names[name],
                count=int(counts[n]),
                total_s=float(ticks[n]) * resolved.tick_s,
                share=float(ticks[n]) / total,
                places=longest(resolved, found, mine),
            )
        )
    return sorted(waits, key=lambda item: -item.total_s)
