"""Computes how busy each resource was over time, by spreading instructions' declared work over their intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..isa import cost
from ..isa.traffic import link_bytes
from ..machine import Machine
from ..targets.hopper import loads
from ..trace import IntervalKind
from .resolve import Resolved
from .spans import Floats, Ints, Mask

# The resources, with the unit of their rate. The cache is the last-level cache. "link out" is what a rank sends to
# others, and "link in" what it receives.
RESOURCES = (
    ("matrix", "FLOP/s"),
    ("vector", "FLOP/s"),
    ("memory", "B/s"),
    ("cache", "B/s"),
    ("link out", "B/s"),
    ("link in", "B/s"),
)
# The resources that limit every program. The cache is not one: its use depends on the program's tile sizes.
ROOFLINE = ("matrix", "vector", "memory", "link out", "link in")
BINS = 96  # number of equal parts of the trace for which `Resource.curve` has a value


@dataclass(frozen=True)
class Resource:
    """The use of one resource, such as memory. `rate` is the mean rate over all ranks and steps, and `fraction` is rate
    / `peak`. `ranks` has the fraction for each rank. For `curve`, the trace is divided into BINS equal parts of time:
    it has the mean fraction over all ranks in each part."""

    name: str
    unit: str
    peak: float
    rate: float
    fraction: float
    ranks: list[float]
    curve: list[float]


def peaks(machine: Machine, workers: int) -> list[float]:
    """Return the peak rates of RESOURCES for `workers` of the machine's workers; 0 if a rate is unknown."""
    part = machine.with_workers(min(workers, machine.workers))
    device = (part.matrix_flops, part.vector_flops, part.memory_bytes_per_s, part.cache_bytes_per_s)
    return [*device, part.link_bytes_per_s, part.link_bytes_per_s]


def resources(resolved: Resolved) -> list[Resource]:
    """Return those resources that the program uses and whose peak rate is known."""
    amounts = curves(resolved, BINS)
    steps_s = max(resolved.steps, 1) * resolved.tick_s
    found = []
    limits = peaks(resolved.machine, resolved.program.workers)
    for (name, unit), peak, amount in zip(RESOURCES, limits, amounts.transpose(1, 0, 2), strict=True):
        if not amount.any() or not peak:
            continue
        rates = amount.sum(axis=1) / steps_s
        curve = amount.mean(axis=0) / (resolved.period * resolved.tick_s / BINS * peak)
        found.append(
            Resource(
                name=name,
                unit=unit,
                peak=peak,
                rate=float(rates.mean()),
                fraction=float(rates.mean()) / peak,
                ranks=[float(r) / peak for r in rates],
                curve=[round(float(c), 6) for c in curve],
            )
        )
    return found


def curves(resolved: Resolved, bins: int) -> Floats:
    """Return the FLOPs or bytes of each resource over time, [ranks, RESOURCES, bins]. Bins are equal parts of the
    trace.

    A trace has no rates, so the work of an instruction is spread evenly over its intervals. FLOPs are spread over
    COMPUTE, and sent bytes over STORE (or COMPUTE if there is none). Loaded bytes are spread over LOAD on a GPU. On a
    CPU, they are spread over COMPUTE, because LOADs only prefetch a part. All loaded bytes also count for the cache.
    """
    declared, link = _declared(resolved)
    matrix, vector, memory, loaded = declared[resolved.record].T
    link = link[resolved.record]
    if (items := resolved.attention) is not None:
        at, told = items
        matrix[at], memory[at] = told.T
        loaded[at] = memory[at]
    compute = resolved.kind(IntervalKind.COMPUTE)
    worker_role = resolved.rows["role"] == 0
    load = _or_else(resolved, resolved.kind(IntervalKind.LOAD) & ~worker_role, compute)
    store = _or_else(resolved, resolved.kind(IntervalKind.STORE), compute)
    rank = resolved.rows["rank"].astype(np.int64)
    out = np.zeros((resolved.program.ranks, len(RESOURCES), bins))
    own = ((compute, matrix), (compute, vector), (load, memory), (load, loaded), (store, link.sum(axis=1)))
    for resource, (chosen, amount) in enumerate(own):
        out[:, resource] = _spread(resolved, chosen, amount, rank, bins)
    for peer in range(resolved.program.ranks):
        # What a rank receives is the sum of what all ranks send to it.
        out[peer, -1] = _spread(resolved, store, link[:, peer], np.zeros_like(rank), bins)[0]
    return out


def _declared(resolved: Resolved) -> tuple[Floats, Floats]:
    """Return the work of each record (instruction) as two arrays. The first, [records, 4], has matrix FLOPs, vector
    FLOPs, bytes read from memory, and all bytes loaded, also from the cache. The second, [records, ranks], has the
    bytes sent to each rank."""
    count, ranks = len(resolved.records), resolved.program.ranks
    work, link = np.zeros((count, 4)), np.zeros((count, ranks))
    for phase, dims, rows, columns in resolved.program.by_phase():
        if not phase.control:
            done = cost(phase, columns, dims)
            loaded = loads(phase, columns, dims)
            every = done.matrix_flops, done.vector_flops, done.memory_bytes, loaded.weights + loaded.read
            work[rows] = np.stack(every, axis=1)
            # In tests, each rank of a program may run a model of its own, and send nothing to the others.
            if dims.split.tp == ranks:
                link[rows] = link_bytes(phase, columns, dims)
    return work, link


def _or_else(resolved: Resolved, wanted: Mask, other: Mask) -> Mask:
    """Return a mask that selects each instruction's intervals in `wanted` or, if it has none, those in `other`."""
    has = np.zeros(resolved.executions, dtype=bool)
    has[resolved.instance[wanted]] = True
    chosen: Mask = wanted | (other & ~has[resolved.instance])
    return chosen


def _spread(resolved: Resolved, chosen: Mask, amount: Floats, row: Ints, bins: int) -> Floats:
    """Spread instructions' work over time, and return the work per rank and time bin, [ranks, bins]. For every
    interval, `amount` has the work of its instruction, and `row` the rank for which it counts. The work is spread
    evenly over those of the instruction's intervals that the mask `chosen` selects."""
    i = np.flatnonzero(chosen & (amount > 0))
    begin = resolved.begin[i].astype(np.float64)
    length = np.maximum(resolved.length[i], 1)  # an interval of length 0 counts as one tick
    whole = np.bincount(resolved.instance[i], length, resolved.executions)
    rate = amount[i] / whole[resolved.instance[i]]
    width = resolved.period / bins
    end = np.minimum(begin + length, resolved.period)
    first, last = (begin // width).astype(np.int64), np.minimum(end // width, bins - 1).astype(np.int64)
    rows, size = resolved.program.ranks, resolved.program.ranks * (bins + 1)
    # If an interval lies inside one bin, its whole length is added to this bin. A longer interval adds the time that it
    # covers in its first bin and in its last bin. To each bin in between, it adds the bin's full width.
    inside = first == last
    head = np.where(inside, end - begin, (first + 1) * width - begin) * rate
    tail = np.where(inside, 0.0, end - last * width) * rate
    base = row[i] * (bins + 1)
    total = np.bincount(base + first, head, size) + np.bincount(base + last, tail, size)
    between = np.where(inside, 0.0, rate * width)
    step = np.bincount(base + np.where(inside, first, first + 1), between, size)
    step = step - np.bincount(base + last, between, size)
    shape = (rows, bins + 1)
    full = total.reshape(shape) + np.maximum(np.cumsum(step.reshape(shape), axis=1), 0.0)
    return full[:, :bins].astype(np.float64)
