"""Assigns tasks to instruction streams and orders them. All streams of a segment (prologue, one layer or epilogue)
follow one topological order of the segment's tasks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dims, OperationFamily, Result, Units, ceil_div, itemsize
from megakernel.machine import Machine
from megakernel.scheduler.cost import panel_blocks, seconds, unit_seconds
from megakernel.scheduler.options import Options
from megakernel.scheduler.tasks import PhaseTasks, ordinals


@dataclass(frozen=True)
class Placed:
    """The worker that runs each task, and the task's position in the topological order that all workers follow."""

    worker: NDArray[np.int64]
    order: NDArray[np.int64]


def place(segment: list[PhaseTasks], dims: Dims, machine: Machine, options: Options) -> list[Placed]:
    """Place the tasks of one segment: the prologue, one layer or the epilogue.

    Stages are matmuls, attention, and phases that store q, k and v, because an attention task may need all rows of such
    a phase. Stages usually run one after another. Inside a stage, panels (groups of row blocks) run in order. Inside a
    panel, the tasks run column by column, so that a weight tile read from memory serves the whole panel. If arithmetic
    limits one of two neighbouring matmul stages, and links or memory limit the other, their panels alternate, so that
    both resources are busy. Norms, reductions and sampling between two stages are placed well after the producers of
    their inputs and well before their consumers. So neither they nor the consumers wait.

    Panels alternate only with `options.interleave`. On a single GPU, a matmul whose panels do not alternate may have
    larger ones than `options.panel`: their inputs fill half of the L2 cache, so they stay there while weights stream
    through it. There are at least three panels, because neighbouring phases overlap."""
    kind = ordinals(segment)
    blocks = panel_blocks(dims, machine, options.panel)
    total = max(int(tasks.block.max()) for tasks in segment) + 1
    count = ceil_div(total, blocks)
    starts = _turns(segment, kind, count, dims, machine) if options.interleave else [(k, 1 / count) for k in kind]
    panels, keys = list[NDArray[np.int32]](), list[NDArray[np.float64]]()
    for tasks, (start, step) in zip(segment, starts, strict=True):
        size = blocks
        if tasks.phase.is_matmul and step == 1 / count and dims.worker.units == Units.TENSOR and dims.split.tp == 1:
            inputs = tasks.phase.inner(dims.split) * itemsize(dims.model) * dims.bucket.row_block * total
            size = max(size, ceil_div(total, max(3, math.ceil(2 * inputs / machine.cache_bytes))))
        panels.append(tasks.block // size)
        # A panel's key is that of its last row block, so that the panel follows all its inputs.
        keys.append(start + np.minimum(panels[-1] * size + size - 1, total - 1) // blocks * step)
    workers: dict[int, NDArray[np.int64]] = {}
    for rank in range(dims.split.tp):
        own = [i for i, tasks in enumerate(segment) if tasks.rank == rank]
        parts = [(segment[i], panels[i], keys[i]) for i in own]
        placed = _workers(parts, dims.ranks[rank], machine, pipelined=count > 1)
        workers |= dict(zip(own, placed, strict=True))
    sizes = np.cumsum([0, *map(len, segment)])
    kind_of, panel_of = np.repeat(kind, np.diff(sizes)), np.concatenate(panels)
    cols = np.concatenate([tasks.columns.get("col", np.zeros_like(tasks.block)) for tasks in segment])
    rows = np.concatenate([tasks.columns.get("row", np.zeros_like(tasks.block)) for tasks in segment])
    order = np.empty(len(kind_of), dtype=np.int64)
    order[np.lexsort((rows, cols, panel_of, kind_of, np.concatenate(keys)))] = np.arange(len(order))
    return [Placed(workers[i], order[sizes[i] : sizes[i + 1]]) for i in range(len(segment))]


_STAGES = (OperationFamily.MATMUL, OperationFamily.ATTENTION)
# A layer may end with a reduction over ranks and the next layer's norm. Both run panel by panel (a panel is a group of
# row blocks), and follow the layer's last matmul by this number of panels. By then, the partial sums of all ranks
# have arrived.
_LAST_REDUCE_LAG, LAST_NORM_LAG = 3, 5
# A norm or reduction between two stages handles each panel (group of row blocks) in the gap between the panel's end in
# the first stage and its begin in the second. _LEFT is the fraction of the gap that remains then. It is less than
# one half, because in the middle of the gap the second stage may begin another panel, which is more urgent.
_LEFT = 7 / 16
_Turn = tuple[float, float]  # the key of a phase's first panel, and the difference between those of successive panels
_Part = tuple[PhaseTasks, NDArray[np.int32], NDArray[np.float64]]  # a phase's tasks, with panels and keys


def _turns(segment: list[PhaseTasks], kind: list[int], panels: int, dims: Dims, machine: Machine) -> list[_Turn]:
    """Return the turns of each phase. Keys are times without a unit: tasks run in the order of their keys.

    `place` says which phases are stages. The n-th stage, counted from 1, has the keys from n to n + 1. Two
    alternating stages share an interval of length 2 instead: the second lags behind the first by one panel, and by one
    more panel for each phase between them. In any other phase between two stages, a panel's key lies about midway
    between the panel's end in the first stage and its start in the second. If a layer ends with a reduction and the
    next layer's norm, no stage follows in this segment. So both phases follow the last stage panel by panel."""
    of_kind = {k: [p for p, number in zip(segment, kind, strict=True) if number == k] for k in kind}
    stages = [k for k, (one, *_) in of_kind.items() if one.phase.family in _STAGES or one.phase.result is Result.HEADS]
    alone = 1 / panels
    turns: dict[int, _Turn] = {stage: (number, alone) for number, stage in enumerate(stages, 1)}
    for number, (stage, following) in enumerate(itertools.pairwise(stages), 1):
        lag = following - stage
        taken = turns[stage][1] != alone  # `stage` already alternates with its predecessor
        if not taken and panels > 2 * lag and _complementary(of_kind[stage], of_kind[following], dims, machine):
            step = 2 / (panels + lag)
            turns |= {stage: (number, step), following: (number + lag * step, step)}
            # The first phase between the two stages begins 4/3 panels after `stage`, and each further phase begins one
            # panel later, so that its inputs are ready.
            turns |= {k: (number + (k - stage + 1 / 3) * step, step) for k in range(stage + 1, following)}
    if stages and kind[-1] == stages[-1] + 2:
        start, step = turns[stages[-1]]
        turns[kind[-1] - 1] = start + _LAST_REDUCE_LAG * step, step
        turns[kind[-1]] = start + LAST_NORM_LAG * step, step
    for k in kind:
        next_stage = 1 + sum(stage < k for stage in stages)
        turns.setdefault(k, (next_stage - _LEFT * (1 - alone), alone))
    return [turns[k] for k in kind]


def _complementary(first: list[PhaseTasks], second: list[PhaseTasks], dims: Dims, machine: Machine) -> bool:
    """Whether arithmetic limits one of two matmul phases, and memory or a link limits the other: overlap saves time."""
    bound = []
    for stage in (first, second):
        if not stage[0].phase.is_matmul:
            return False
        units = [unit_seconds(p.phase, p.columns, dims.ranks[p.rank], machine) for p in stage]
        arithmetic, memory, link = np.max(units, axis=0)
        bound.append(bool(arithmetic > max(memory, link)))
    return bound[0] != bound[1]


def _workers(parts: list[_Part], dims: Dims, machine: Machine, *, pipelined: bool) -> list[NDArray[np.int64]]:
    """Return the worker of each task of one rank. Tasks are assigned in the order of their keys, each one to the worker
    that is free first. Attention tasks go to the workers in turn. If `pipelined`, a phase begins while workers still
    finish the previous phase, so each worker's load from that phase counts. Otherwise all workers are free then."""
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
        cost = costs[i][members]
        out[i][members] = worker = _first_free(len(members), float(cost.sum()) / len(members), load)
        load += np.bincount(worker, weights=cost, minlength=machine.workers)
    return out


def _first_free(tasks: int, cost: float, load: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the worker of each of `tasks` tasks, which take `cost` seconds each. `load` has the seconds of work that
    each worker has already. Each task in turn goes to the worker with the least work so far."""
    depth = min(tasks, tasks // len(load) + 2 + int((load.max() - load.min()) / cost))
    start = load[:, None] + cost * np.arange(depth)
    return np.argsort(start.T.ravel(), kind="stable")[:tasks] % len(load)
