"""Assigns tasks to streams and orders them. Every stream is a subsequence of one topological order of the segment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..isa import Dims, OperationFamily
from ..machine import Machine
from .cost import panel_blocks, seconds, unit_seconds
from .options import Options, Shape
from .tasks import PhaseTasks, ordinals


@dataclass(frozen=True)
class Placed:
    """Where and when each task runs: its worker, and its position in the common order of all ranks."""

    worker: NDArray[np.int64]
    order: NDArray[np.int64]


def place(segment: list[PhaseTasks], dims: Dims, machine: Machine, options: Options) -> list[Placed]:
    """Place the tasks of one segment.

    Stages (matmuls and attention) run one after another. Inside a stage, panels of row blocks run in order, and inside
    a panel the tasks run column by column, so that a weight tile read from memory serves the whole panel. If one of two
    neighbouring stages is limited by arithmetic and the other by links or memory, they alternate panel by panel. Norms,
    reductions and sampling between two stages are placed well after the producers of their inputs and well before their
    consumers, so neither they nor the consumers wait. Without interleaving, phases run one after another. They also do
    so if tasks wait for whole phases of other ranks, because in every stream such a task must come after those phases.
    """
    kind = ordinals(segment)
    blocks = panel_blocks(dims, machine, options.shape)
    panels = [tasks.block // blocks for tasks in segment]
    count = max(int(panel.max()) + 1 for panel in panels)
    if options.interleave and options.overlap_ranks:
        starts = _turns(segment, kind, count, dims, machine, options.shape)
    else:
        starts = [(k, 1 / count) for k in kind]
    keys = [start + panel * step for (start, step), panel in zip(starts, panels, strict=True)]
    workers: dict[int, NDArray[np.int64]] = {}
    for rank in range(dims.tp):
        own = [i for i, tasks in enumerate(segment) if tasks.rank == rank]
        parts = [(segment[i], panels[i], keys[i]) for i in own]
        placed = _workers(parts, replace(dims, rank=rank), machine, pipelined=count > 1)
        workers |= dict(zip(own, placed, strict=True))
    sizes = np.cumsum([0, *map(len, segment)])
    kind_of, panel_of = np.repeat(kind, np.diff(sizes)), np.concatenate(panels)
    cols = np.concatenate([tasks.columns.get("col", np.zeros_like(tasks.block)) for tasks in segment])
    rows = np.concatenate([tasks.columns.get("row", np.zeros_like(tasks.block)) for tasks in segment])
    order = np.empty(len(kind_of), dtype=np.int64)
    order[np.lexsort((rows, cols, panel_of, kind_of, np.concatenate(keys)))] = np.arange(len(order))
    return [Placed(workers[i], order[sizes[i] : sizes[i + 1]]) for i in range(len(segment))]


def _turns(
    segment: list[PhaseTasks], kind: list[int], panels: int, dims: Dims, machine: Machine, shape: Shape
) -> list[tuple[float, float]]:
    """The sort key of the first panel of each phase, and the step from one panel to the next.

    The keys of a stage span an interval of length 1. A panel of a phase between two stages lies about midway between
    the panel's end in the first stage and its start in the second. Two alternating stages share an interval of length
    2: the second lags behind the first by one panel, and by one more for each kind of phase between them. If a layer
    ends with the next layer's norm, no stage follows the norm in this segment, so the phases after the last stage
    simply follow that stage panel by panel.
    """
    of_kind = {k: [p for p, number in zip(segment, kind, strict=True) if number == k] for k in kind}
    stages = [k for k, members in of_kind.items() if members[0].phase.family in _STAGES]
    turns: dict[int, tuple[float, float]] = {}
    for number, stage in enumerate(stages, 1):
        turns.setdefault(stage, (number, 1 / panels))
        following = stages[number] if number < len(stages) else stage
        lag = following - stage
        if number > 1 and turns[stage][1] > 1 / panels:
            continue
        if lag and panels > 2 * lag and _complementary(of_kind[stage], of_kind[following], dims, machine):
            step = 2 / (panels + lag)
            turns[stage] = number, step
            # The first kind of phase between the two stages begins 4/3 panels after `stage`, and each further kind
            # begins one panel later.
            for k in range(stage + 1, following):
                turns[k] = number + (k - stage + 1 / 3) * step, step
            turns[following] = number + lag * step, step
    if stages and kind[-1] == stages[-1] + 2:
        start, step = turns[stages[-1]]
        turns[kind[-1] - 1] = start + shape.reduce_lag * step, step
        turns[kind[-1]] = start + (shape.reduce_lag + shape.norm_lag) * step, step
    for k in kind:
        number = 1 + sum(stage < k for stage in stages)
        turns.setdefault(k, (number - _LEFT * (1 - 1 / panels), 1 / panels))
    return [turns[k] for k in kind]


_STAGES = (OperationFamily.MATMUL, OperationFamily.ATTENTION)
# Phases between two stages run in the gap between the end of a panel in the first stage and its start in the second.
# This fraction of the gap remains after them. It is less than one half, because at the midpoint an earlier panel may
# begin in the second stage, and that panel is more urgent.
_LEFT = 7 / 16


def _complementary(first: list[PhaseTasks], second: list[PhaseTasks], dims: Dims, machine: Machine) -> bool:
    """Whether one stage is limited by arithmetic and the other by memory or links."""
    bound = []
    for stage in (first, second):
        if not stage[0].phase.is_matmul:
            return False
        units = [unit_seconds(p.phase, p.columns, replace(dims, rank=p.rank), machine) for p in stage]
        arithmetic, memory, link = np.max(units, axis=0)
        bound.append(bool(arithmetic > max(memory, link)))
    return bound[0] != bound[1]


def _workers(
    parts: list[tuple[PhaseTasks, NDArray[np.int32], NDArray[np.floating[Any]]]],
    dims: Dims,
    machine: Machine,
    *,
    pipelined: bool,
) -> list[NDArray[np.int64]]:
    """Assign each task, in the order of keys, to the worker that is free first. Attention tasks are assigned by slot.

    `parts` has a rank's tasks, with the panel and the key of each. With one panel, a phase starts when the previous one
    has ended, so all workers are free. With several panels, a phase begins while workers still finish the previous one,
    so the load carries over.
    """
    load = np.zeros(machine.workers)
    out = [np.arange(len(tasks)) % machine.workers for tasks, _, _ in parts]
    costs = [seconds(tasks.phase, tasks.columns, dims, machine) for tasks, _, _ in parts]
    chunks = []
    for i, (tasks, panel, key) in enumerate(parts):
        if tasks.phase.family is not OperationFamily.ATTENTION:
            order = np.lexsort((tasks.columns["row"], tasks.columns.get("col", tasks.block), panel))
            for members in np.split(order, np.flatnonzero(np.diff(panel[order])) + 1):
                chunks.append((float(key[members[0]]), i, members))
    for _, i, members in sorted(chunks, key=lambda chunk: chunk[:2]):
        if not pipelined:
            load[:] = 0.0
        out[i][members] = worker = _first_free(len(members), float(costs[i][members].mean()), load)
        load += np.bincount(worker, weights=costs[i][members], minlength=machine.workers)
    return out


def _first_free(tasks: int, cost: float, load: NDArray[np.float64]) -> NDArray[np.int64]:
    """The worker of each of `tasks` equal tasks, which are dealt in order to the worker with the least load so far."""
    depth = min(tasks, tasks // len(load) + 2 + int((load.max() - load.min()) / cost))
    start = load[:, None] + cost * np.arange(depth)
    return np.argsort(start.T.ravel(), kind="stable")[:tasks] % len(load)
