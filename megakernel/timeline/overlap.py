"""Measures of overlap, each with its formula, in which |S| is the total length of a set of times. A measure is None
if its divisor is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import MAX_PHASES, cost
from ..machine import Machine
from ..program import Program
from ..trace import IntervalKind
from .resolve import WAIT, Resolved, by_phase
from .spans import Spans, active


@dataclass(frozen=True)
class Overlap:
    """Each field is the function of the same name."""

    inside_worker: float | None
    loads_under_compute: float | None
    across_workers: float | None
    across_ranks: float | None
    phases: float | None


def lane_spans(resolved: Resolved, chosen: NDArray[np.bool_]) -> Spans:
    """The union of the chosen intervals per lane, with lanes laid end to end."""
    base = resolved.lane[chosen] * resolved.period
    return Spans.union(base + resolved.begin[chosen], base + resolved.end[chosen])


def inside_worker(resolved: Resolved) -> float | None:
    """Loads hidden = sum over LOAD of |ahead and (waits or COMPUTE of the worker)| / sum of |ahead|.

    ahead = [begin, min(end, own COMPUTE's begin)): the part of a load that must be finished before the instruction can
    start. A load is hidden while its worker waits for counters or pages, or computes an earlier instruction. Data that
    a long instruction loads during its own COMPUTE is not counted here, but in `loads_under_compute`.
    """
    load = resolved.kind(IntervalKind.LOAD)
    compute = resolved.kind(IntervalKind.COMPUTE)
    own = np.full(resolved.launches * resolved.program.instructions, resolved.period, dtype=np.int64)
    np.minimum.at(own, resolved.instance[compute], resolved.begin[compute])
    begin = resolved.begin[load]
    ahead = np.maximum(np.minimum(resolved.end[load], own[resolved.instance[load]]), begin)
    return _covered(resolved, load, begin, ahead, compute | resolved.kind(*WAIT))


def loads_under_compute(resolved: Resolved) -> float | None:
    """sum over LOAD of |load and any COMPUTE of its worker| / sum of |load|. The COMPUTE of the
    load's own instruction counts too.
    """
    load = resolved.kind(IntervalKind.LOAD)
    begin, end = resolved.begin[load], resolved.end[load]
    return _covered(resolved, load, begin, end, resolved.kind(IntervalKind.COMPUTE))


def _covered(
    resolved: Resolved,
    chosen: NDArray[np.bool_],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    cover: NDArray[np.bool_],
) -> float | None:
    """The fraction of [begin, end) of the chosen intervals that `cover` covers on the same lane."""
    total = int((end - begin).sum())
    base = resolved.lane[chosen] * resolved.period
    return float(lane_spans(resolved, cover).covered(base + begin, base + end).sum()) / total if total else None


def exposed_communication(resolved: Resolved, releaser: NDArray[np.int64]) -> float:
    """sum over workers of |counter waits released by another rank, without COMPUTE| / (workers x time of all steps).

    releaser: of each interval (-1: none). A loader's wait during its worker's COMPUTE costs nothing.
    """
    rank = resolved.rows["rank"]
    remote = (releaser >= 0) & (rank[releaser] != rank)
    compute = resolved.kind(IntervalKind.COMPUTE)
    blocked = lane_spans(resolved, remote | compute).total() - lane_spans(resolved, compute).total()
    first, last = resolved.launch_spans()
    steps = int((last - first).sum())
    return blocked / (steps * resolved.lanes) if steps else 0.0


def compute_bound(program: Program, machine: Machine) -> set[int]:
    """The numbers of phases whose matrix FLOPs / memory bytes, summed over the program, exceed the machine's balance.

    The balance is matrix_flops / memory_bytes_per_s. All other phases are memory-bound: norms, gathers and sampling do
    no matrix work, and attention declares none (its work is in the step table).
    """
    work = np.zeros((MAX_PHASES + 1, 2))
    for phase, dims, _, columns in by_phase(program):
        done = cost(phase, columns, dims)
        work[phase.number] += done.matrix_flops.sum(), done.memory_bytes.sum()
    flops, bytes_ = work.T
    return set(np.flatnonzero(flops > bytes_ * machine.matrix_flops / machine.memory_bytes_per_s).tolist())


def across_workers(resolved: Resolved, machine: Machine) -> float | None:
    """|a worker computes a memory-bound instruction while another worker computes a compute-bound one| / |some worker
    computes a memory-bound instruction|.
    """
    compute = resolved.kind(IntervalKind.COMPUTE)
    matrix = np.isin(resolved.number, list(compute_bound(resolved.program, machine)))
    memory = ~matrix & ~resolved.control
    chosen = (compute & memory, compute & matrix, compute)
    length, (m, c, workers) = active([lane_spans(resolved, k).moments(resolved.period) for k in chosen])
    total = int(length[m > 0].sum())
    return float(length[(m > 0) & (c > 0) & (workers > 1)].sum()) / total if total else None


def phases(resolved: Resolved) -> float | None:
    """|workers compute instructions of >= 2 (layer, phase) at once| / |some worker computes|.

    It is 0 for a program with a grid barrier after every phase.
    """
    return _phases_together(resolved, lane_spans(resolved, resolved.kind(IntervalKind.COMPUTE)))


def across_ranks(resolved: Resolved) -> float | None:
    """|ranks compute instructions of >= 2 (layer, phase) at once| / |some worker computes|; None for one rank.

    It tends to 0 if ranks wait for each other after every phase, because then no rank begins a phase before all ranks
    have ended the previous one.
    """
    if resolved.program.ranks == 1:
        return None
    compute = resolved.kind(IntervalKind.COMPUTE)
    base = resolved.rows["rank"][compute].astype(np.int64) * resolved.period
    by_rank = Spans.union(base + resolved.begin[compute], base + resolved.end[compute])
    return _phases_together(resolved, by_rank)


def _phases_together(resolved: Resolved, busy: Spans) -> float | None:
    """The fraction of the time covered by `busy` in which two or more lanes (or ranks) of `busy` compute, and these
    compute two or more (layer, phase).
    """
    compute = resolved.kind(IntervalKind.COMPUTE)
    phase = ((resolved.segment * (resolved.program.dims.layers + 1) + resolved.block) << 8) + resolved.number
    base = np.unique(phase[compute], return_inverse=True)[1] * resolved.period  # phases end to end
    by_phase = Spans.union(base + resolved.begin[compute], base + resolved.end[compute])
    length, (kinds, who) = active([s.moments(resolved.period) for s in (by_phase, busy)])
    total = int(length[who > 0].sum())
    return float(length[(kinds > 1) & (who > 1)].sum()) / total if total else None


def overlap(resolved: Resolved, machine: Machine) -> Overlap:
    return Overlap(
        inside_worker=inside_worker(resolved),
        loads_under_compute=loads_under_compute(resolved),
        across_workers=across_workers(resolved, machine),
        across_ranks=across_ranks(resolved),
        phases=phases(resolved),
    )
