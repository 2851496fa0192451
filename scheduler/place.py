"""From tasks to streams and an order. Every stream is a subsequence of one topological order of the segment."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..isa import Dims, Family
from ..machine import Machine
from .cost import panel_blocks, seconds
from .lower import Phase, kinds


@dataclass(frozen=True)
class Placed:
    """Where and when each instruction of a phase runs: its worker and its position in the segment's order.

    Positions are those of one order of all ranks.
    """

    worker: NDArray[np.int64]
    order: NDArray[np.int64]


def place(phases: list[Phase], dims: Dims, machine: Machine, *, interleave: bool = True) -> list[Placed]:
    """Place one segment.

    Stages (matmuls and attention) run one after the other; inside a stage, panels of row blocks in order, and inside
    a panel column by column, so that a weight tile read from memory serves the whole panel. What lies between
    two stages, a norm, a reduction or sampling, is ordered halfway between the panel's own two stages: its inputs are
    then long complete and its consumers far away, so neither side waits. Without `interleave` phases run one after
    the other.
    """
    kind = kinds(phases)
    blocks = panel_blocks(dims, machine)
    panels = [phase.block // blocks for phase in phases]
    count = max(int(panel.max()) + 1 for panel in panels)
    keys = _keys(phases, kind, panels, count, interleave)
    workers: dict[int, NDArray[np.int64]] = {}
    for rank in range(dims.tp):
        own = [i for i, phase in enumerate(phases) if phase.rank == rank]
        rank_dims = replace(dims, rank=rank)
        placed = _workers([phases[i] for i in own], [panels[i] for i in own], rank_dims, machine, pipelined=count > 1)
        workers |= dict(zip(own, placed, strict=True))
    sizes = np.cumsum([0, *map(len, phases)])
    kind_of = np.repeat(kind, np.diff(sizes))
    panel_of = np.concatenate(panels)
    cols = np.concatenate([phase.columns.get("col", np.zeros_like(phase.block)) for phase in phases])
    rows = np.concatenate([phase.columns.get("row", np.zeros_like(phase.block)) for phase in phases])
    order = np.empty(len(kind_of), dtype=np.int64)
    order[np.lexsort((rows, cols, panel_of, kind_of, np.concatenate(keys)))] = np.arange(len(order))
    return [Placed(workers[i], order[sizes[i] : sizes[i + 1]]) for i in range(len(phases))]


def _keys(
    phases: list[Phase], kind: list[int], panels: list[NDArray[np.int32]], count: int, interleave: bool
) -> list[NDArray[np.float64]]:
    """Sort keys. Panel p of stage s has s + p / P; what precedes stage s lies midway between the end of its panel
    in stage s - 1 and its start in stage s."""
    if not interleave:
        return [k + panel / count for k, panel in zip(kind, panels, strict=True)]
    keys: list[NDArray[np.float64]] = []
    stages = {k for k, phase in zip(kind, phases, strict=True) if _is_stage(phase)}
    for k, phase, panel in zip(kind, phases, panels, strict=True):
        stage = 1 + sum(s < k for s in stages)
        keys.append(stage + panel / count if _is_stage(phase) else stage - 0.5 + (2 * panel + 1) / (2 * count))
    return keys


def _is_stage(phase: Phase) -> bool:
    return phase.instruction.family in (Family.MATMUL, Family.ATTENTION)


def _workers(
    phases: list[Phase], panels: list[NDArray[np.int32]], dims: Dims, machine: Machine, *, pipelined: bool
) -> list[NDArray[np.int64]]:
    """Give each task, in order, to the worker that is free first. Slots of attention are workers.

    With one panel a phase starts when the one before has ended, so all workers are free; with more, a phase
    begins where workers run out of the last one, so the load carries over.
    """
    load = np.zeros(machine.workers)
    out: list[NDArray[np.int64]] = []
    for phase, panel in zip(phases, panels, strict=True):
        if phase.instruction.family is Family.ATTENTION:
            out.append(phase.columns["slot"].astype(np.int64))
            continue
        if not pipelined:
            load[:] = 0.0
        cost = seconds(phase.instruction, phase.columns, dims, machine)
        worker = np.empty(len(phase), dtype=np.int64)
        order = np.lexsort((phase.columns["row"], phase.columns.get("col", phase.block), panel))
        for tasks in np.split(order, np.flatnonzero(np.diff(panel[order])) + 1):
            worker[tasks] = _first_free(len(tasks), float(cost[tasks].mean()), load)
            load += np.bincount(worker[tasks], weights=cost[tasks], minlength=machine.workers)
        out.append(worker)
    return out


def _first_free(tasks: int, cost: float, load: NDArray[np.float64]) -> NDArray[np.int64]:
    """Workers of equal tasks dealt in order, each to the worker with the least load so far."""
    depth = min(tasks, tasks // len(load) + 2 + int((load.max() - load.min()) / cost))
    start = load[:, None] + cost * np.arange(depth)
    return np.argsort(start.T.ravel(), kind="stable")[:tasks] % len(load)
