"""Measures how well work overlaps in a trace. A measure is None if its divisor is 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..isa import MAX_PHASES, cost
from ..trace import IntervalKind
from .resolve import WAIT, Resolved
from .spans import Ints, Mask, Spans, active


@dataclass(frozen=True)
class Overlap:
    """The measures of overlap of one trace. Each field is computed by the function of the same name."""

    inside_worker: float | None
    loads_under_compute: float | None
    across_workers: float | None
    across_ranks: float | None
    phases: float | None


def lane_spans(resolved: Resolved, chosen: Mask, lane: Ints | None = None) -> Spans:
    """Return the union of the intervals `chosen`. Lane (worker) n is shifted by n periods, to keep lanes apart."""
    base = (resolved.lane if lane is None else lane)[chosen] * resolved.period
    return Spans.union(base + resolved.begin[chosen], base + resolved.end[chosen])


def inside_worker(resolved: Resolved) -> float | None:
    """Return the fraction of loading time that is hidden: meanwhile, the worker waits or computes an earlier
    instruction. The part of a load after its own instruction's COMPUTE has begun does not count as hidden."""
    load = resolved.kind(IntervalKind.LOAD)
    compute = resolved.kind(IntervalKind.COMPUTE)
    own = np.full(resolved.executions, resolved.period, dtype=np.int64)
    np.minimum.at(own, resolved.instance[compute], resolved.begin[compute])
    begin = resolved.begin[load]
    ahead = np.maximum(np.minimum(resolved.end[load], own[resolved.instance[load]]), begin)
    return _covered(resolved, load, begin, ahead, compute | resolved.kind(*WAIT))


def loads_under_compute(resolved: Resolved) -> float | None:
    """The fraction of loading time in which the worker computes any instruction, including the one that loads."""
    load = resolved.kind(IntervalKind.LOAD)
    begin, end = resolved.begin[load], resolved.end[load]
    return _covered(resolved, load, begin, end, resolved.kind(IntervalKind.COMPUTE))


def _covered(resolved: Resolved, chosen: Mask, begin: Ints, end: Ints, cover: Mask) -> float | None:
    """There is one time span [begin, end) for each interval in `chosen`. Return the fraction of all spans' time during
    which the interval's worker also has an interval in `cover`."""
    total = int((end - begin).sum())
    base = resolved.lane[chosen] * resolved.period
    return float(lane_spans(resolved, cover).covered(base + begin, base + end).sum()) / total if total else None


def exposed_communication(resolved: Resolved) -> float:
    """The fraction of all workers' time in which a worker does not compute, but waits for another rank's signal."""
    rank, releaser = resolved.rows["rank"], resolved.releaser
    remote = (releaser >= 0) & (rank[releaser] != rank)
    compute = resolved.kind(IntervalKind.COMPUTE)
    blocked = lane_spans(resolved, remote | compute).total() - lane_spans(resolved, compute).total()
    return blocked / (resolved.steps * resolved.lanes) if resolved.steps else 0.0


def compute_bound(resolved: Resolved) -> set[int]:
    """Return the numbers of the compute-bound phases. Their matrix FLOPs per byte read from memory, summed over the
    program, exceed the ratio of the machine's peak rates. All other phases count as memory-bound. So does attention,
    whose work depends on the step's sequences."""
    work = np.zeros((MAX_PHASES + 1, 2))
    for phase, dims, _, columns in resolved.program.by_phase():
        done = cost(phase, columns, dims)
        work[phase.number] += done.matrix_flops.sum(), done.memory_bytes.sum()
    flops, bytes_ = work.T
    machine = resolved.machine
    return set(np.flatnonzero(flops > bytes_ * machine.matrix_flops / machine.memory_bytes_per_s).tolist())


def across_workers(resolved: Resolved) -> float | None:
    """Of the time in which some worker computes a memory-bound instruction, return the fraction in which another worker
    computes a compute-bound one."""
    compute = resolved.kind(IntervalKind.COMPUTE)
    matrix = np.isin(resolved.number, list(compute_bound(resolved)))
    memory = ~matrix & ~resolved.control
    chosen = (compute & memory, compute & matrix, compute)
    length, (m, c, workers) = active([lane_spans(resolved, k) for k in chosen], resolved.period)
    total = int(length[m > 0].sum())
    return float(length[(m > 0) & (c > 0) & (workers > 1)].sum()) / total if total else None


def phases(resolved: Resolved) -> float | None:
    """Of the time in which at least one worker computes, return the fraction in which at least two compute, and not all
    of them in the same phase of the same layer."""
    return _phases_together(resolved, lane_spans(resolved, resolved.kind(IntervalKind.COMPUTE)))


def across_ranks(resolved: Resolved) -> float | None:
    """Of the time in which at least one rank computes, return the fraction in which at least two compute, and not all
    their instructions belong to the same phase of the same layer. None for a single rank."""
    if resolved.program.ranks == 1:
        return None
    rank = resolved.rows["rank"].astype(np.int64)
    return _phases_together(resolved, lane_spans(resolved, resolved.kind(IntervalKind.COMPUTE), rank))


def _phases_together(resolved: Resolved, busy: Spans) -> float | None:
    """Return how much different phases overlap: the time in which at least two lanes compute, and not all of them in
    the same phase of the same layer, divided by the time in which any computes. `busy` has when each lane computes."""
    compute = resolved.kind(IntervalKind.COMPUTE)
    phase = ((resolved.segment * (resolved.program.dims.model.layers + 1) + resolved.block) << 8) + resolved.number
    # Give `lane_spans` the number of each pair (layer, phase) instead of a lane, to see which pairs run at a time.
    by_phase = lane_spans(resolved, compute, np.unique(phase, return_inverse=True)[1])
    length, (kinds, who) = active([by_phase, busy], resolved.period)
    total = int(length[who > 0].sum())
    return float(length[(kinds > 1) & (who > 1)].sum()) / total if total else None


def overlap(resolved: Resolved) -> Overlap:
    measures = inside_worker, loads_under_compute, across_workers, across_ranks, phases
    return Overlap(*(measure(resolved) for measure in measures))
