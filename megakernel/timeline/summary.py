"""The numbers of a trace: one object, ready for JSON, that the terminal table, the page and `--json` share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import machine as machines
from ..isa import MAX_PHASES
from ..machine import MACHINES, Machine
from ..program import Program
from ..trace import IntervalKind, Trace
from .critical import CriticalPath, critical_path
from .outliers import Outliers, outliers
from .overlap import Overlap, exposed_communication, overlap
from .places import Place, longest
from .resolve import WORK, Resolved, resolve
from .resources import Resource, resources
from .states import BLOCKED, BUSY, Pieces, State, pieces
from .waits import Causes, causes, finishes, releasers
from .waterfall import Waterfall, waterfall


@dataclass(frozen=True)
class Worker:
    """Fractions of the step that add up to 1; see `Summary`."""

    rank: int
    worker: int
    busy: float
    wait: float
    idle: float


@dataclass(frozen=True)
class PhaseTime:
    """The COMPUTE and STORE time of one phase over all workers; `share` is its fraction of all such time.

    `median_s` is the median length of its COMPUTE intervals. `outliers` counts those longer than FAR * `median_s`, and
    `outliers_s` is the sum of their time beyond `median_s`.
    """

    name: str
    family: str
    count: int
    total_s: float
    mean_s: float
    share: float
    median_s: float
    outliers: int
    outliers_s: float


@dataclass(frozen=True)
class WaitTime:
    """The cost of waits of phase `instruction` for `cause`, the phases that signal the counter that was satisfied last.

    The cost is the time in which the worker did nothing else. `count` counts waits with a cost. `share` is the fraction
    of the cost of all waits. `places` has the longest waits.
    """

    instruction: str
    cause: str
    count: int
    total_s: float
    share: float
    places: list[Place]


@dataclass(frozen=True)
class Summary:
    """The numbers of a trace over all launches; only the critical path is that of the last launch. Times are in
    seconds, and fractions are not in percent.

    `step_s`: last end - first begin, mean over launches. Fractions of the steps' time per worker (see states.py): busy
    = |COMPUTE, STORE, LOAD|, wait = |WAIT, PAGE|, idle = |IDLE, END|. `busy` is the mean over workers, `computing` the
    mean of COMPUTE alone. `imbalance` = max worker busy / mean - 1. `dropped` intervals did not fit the trace buffer.
    `clock_error_s` bounds the offset between the clocks of ranks, and so the error of all times between ranks.
    `without_attention`: the trace lacks attention's work, so resources lack it too. The other fields are explained at
    the function or class of the same name.
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
    families: dict[str, float]
    waits: list[WaitTime]
    per_worker: list[Worker]
    critical_path: CriticalPath
    waterfall: Waterfall


def summarise(program: Program, trace: Trace, machine: Machine | None = None) -> Summary:
    """All metrics. `machine` has the peak rates, which also separate memory-bound from compute-bound instructions; it
    defaults to the program's machine.

    Raises MegakernelError if the trace is empty or damaged, or belongs to another program.
    """
    resolved = resolve(program, trace)
    finish = finishes(resolved)
    return summarise_resolved(resolved, causes(program), finish, releasers(resolved, finish), machine)


def summarise_resolved(
    resolved: Resolved,
    cause: Causes,
    finish: NDArray[np.int64],
    releaser: NDArray[np.int64],
    machine: Machine | None = None,
) -> Summary:
    """`summarise` for callers that have already joined trace and program."""
    program, header = resolved.program, resolved.trace.header
    first, last = resolved.launch_spans()
    steps = int((last - first).sum())
    found = pieces(resolved)
    workers = _workers(resolved, found, steps)
    which, names = _blocked(resolved, cause, found)
    busy = [w.busy for w in workers]
    mean = sum(busy) / len(busy)
    described = machine or machine_of(program)
    far = outliers(resolved)
    instructions, used = _instructions(resolved, far), resources(resolved, described)
    families: dict[str, float] = {}
    for item in instructions:
        families[item.family] = families.get(item.family, 0.0) + item.share
    return Summary(
        step_s=steps / resolved.launches * header.tick_s,
        launches=resolved.launches,
        ranks=program.ranks,
        workers=program.workers,
        intervals=len(resolved),
        dropped=header.dropped,
        clock_error_s=header.clock_error_s,
        source=header.source,
        machine=program.machine,
        busy=mean,
        computing=float(found.per_lane(resolved.lanes, State.COMPUTE).sum()) / (max(steps, 1) * resolved.lanes),
        wait=sum(w.wait for w in workers) / len(workers),
        imbalance=max(busy) / mean - 1 if mean else 0.0,
        exposed_communication=exposed_communication(resolved, releaser),
        overlap=overlap(resolved, described),
        resources=used,
        without_attention=resolved.attention is None and len(resolved.of_attention) > 0,
        instructions=instructions,
        families=families,
        waits=_waits(resolved, found, which, names),
        per_worker=workers,
        critical_path=critical_path(resolved, finish, releaser),
        waterfall=waterfall(resolved, found, used, which, names, far, described),
    )


def machine_of(program: Program) -> Machine:
    """The machine that the program names. If its description came from a file, it is unknown here, and this host
    replaces it.
    """
    return MACHINES.get(program.machine) or machines.host()


def _workers(resolved: Resolved, found: Pieces, steps: int) -> list[Worker]:
    busy, wait = (found.per_lane(resolved.lanes, *states) / max(steps, 1) for states in (BUSY, BLOCKED))
    return [
        Worker(*divmod(lane, resolved.program.workers), busy=float(b), wait=float(w), idle=float(1.0 - b - w))
        for lane, (b, w) in enumerate(zip(busy, wait, strict=True))
    ]


def _instructions(resolved: Resolved, far: Outliers) -> list[PhaseTime]:
    """The phases, sorted by their time without that of outliers, longest first."""
    work = resolved.kind(*WORK)
    ticks = np.bincount(resolved.number[work], (resolved.end - resolved.begin)[work], minlength=MAX_PHASES + 1)
    executed = np.unique(resolved.instance[work], return_index=True)[1]
    counts = np.bincount(resolved.number[work][executed], minlength=MAX_PHASES + 1)
    slow, late = resolved.number[far.chosen], far.beyond(resolved)[far.chosen]
    many, beyond = np.bincount(slow, minlength=MAX_PHASES + 1), np.bincount(slow, late, minlength=MAX_PHASES + 1)
    tick, total = resolved.trace.header.tick_s, max(float(ticks.sum()), 1.0)
    found = [
        PhaseTime(
            name=phase.name,
            family=phase.family.name.lower(),
            count=int(counts[n]),
            total_s=float(ticks[n]) * tick,
            mean_s=float(ticks[n]) / int(counts[n]) * tick,
            share=float(ticks[n]) / total,
            median_s=float(far.median[n]) * tick,
            outliers=int(many[n]),
            outliers_s=float(beyond[n]) * tick,
        )
        for n, phase in resolved.program.forward.by_number.items()
        if counts[n]
    ]
    return sorted(found, key=lambda item: item.outliers_s - item.total_s)


def wait_causes(resolved: Resolved, cause: Causes) -> NDArray[np.int64]:
    """For each counter wait, an index into `cause.names`; -1 for other intervals and for waits on nothing."""
    result = np.full(len(resolved), -1, dtype=np.int64)
    chosen = resolved.kind(IntervalKind.COUNTER_WAIT)
    for segment in range(3):
        for later in (False, True):
            here = chosen & (resolved.segment == segment) & ((resolved.block > 0) == later)
            rows = resolved.rows[here]
            table = cause.table(segment, int(later))
            result[here] = table[rows["instruction"], rows["slot"] % table.shape[1]]
    return result


def _blocked(resolved: Resolved, cause: Causes, found: Pieces) -> tuple[NDArray[np.int64], list[str]]:
    """For each piece of time, the cause of its worker's wait as an index into the names; -1 if it does not wait."""
    names = [*cause.names, "a page", "a signal of no phase"]
    of_interval = wait_causes(resolved, cause)
    of_interval[of_interval < 0] = len(names) - 1
    of_interval[resolved.kind(IntervalKind.PAGE_WAIT)] = len(names) - 2
    which = np.full(len(found.state), -1, dtype=np.int64)
    here = found.of(*BLOCKED)
    which[here] = of_interval[found.interval[here]]
    return which, names


def _waits(resolved: Resolved, found: Pieces, which: NDArray[np.int64], names: list[str]) -> list[WaitTime]:
    chosen = np.flatnonzero(which >= 0)
    total = max(int(found.length[chosen].sum()), 1)
    interval = found.interval[chosen]
    pairs, at = np.unique(np.stack([resolved.number[interval], which[chosen]]), axis=1, return_inverse=True)
    ticks = np.bincount(at.ravel(), found.length[chosen], minlength=pairs.shape[1])
    # A wait that is interrupted by work counts as one wait.
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
                total_s=float(ticks[n]) * resolved.trace.header.tick_s,
                share=float(ticks[n]) / total,
                places=longest(resolved, found, mine),
            )
        )
    return sorted(waits, key=lambda item: -item.total_s)
