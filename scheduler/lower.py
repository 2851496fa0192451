"""Cuts the operations of a step (phases) into tile tasks. Each task becomes one instruction; later parts of the
compiler decide on which worker and when it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import BUFFERS, OPERATIONS, Column, Dims, Phase, Result, Rows, ceil_div
from megakernel.isa.buffers import given
from megakernel.isa.operations.experts import share
from megakernel.isa.operations.spec import Cut
from megakernel.isa.record import SIGNALS
from megakernel.machine import Machine
from megakernel.scheduler.cost import panel_blocks, seconds
from megakernel.scheduler.regions import head_groups
from megakernel.scheduler.tasks import PhaseTasks
from megakernel.targets.pages import output_columns


@dataclass(frozen=True)
class _Blocks:
    """Some of the row blocks into which a step's rows are divided. `total` rows form blocks of `length` rows each, the
    last one possibly shorter. `numbers` lists the selected blocks."""

    total: int
    length: int
    numbers: Column

    def __len__(self) -> int:
        return int(np.minimum(self.length, self.total - self.numbers * self.length).sum())


def lower(phases: Iterable[Phase], d: Dims, machine: Machine, panel: int = 0) -> list[PhaseTasks]:
    """Return the tasks of some phases (operations) on the rank `d.rank`, in order. A phase without work on this rank is
    left out. `panel` is the number of row blocks that share one pass over the weights (0: the cost model chooses)."""
    out: list[PhaseTasks] = []
    for phase in phases:
        tasks = _tasks(phase, d, machine, panel, out)
        if len(tasks):
            out.append(tasks)
    return out


def _tasks(phase: Phase, d: Dims, machine: Machine, panel: int, before: list[PhaseTasks]) -> PhaseTasks:
    """Return the tasks of one phase (operation) on the rank `d.rank`. `before` has the tasks of the earlier phases,
    because attention depends on how the QKV projection was cut."""
    match OPERATIONS[phase.operation].cut:
        case Cut.RUNS if _idle(phase, d):
            none = np.zeros(0, dtype=np.int32)
            return PhaseTasks(phase, dict.fromkeys(phase.operands, none), none, d.split.rank)
        case Cut.RUNS:
            return _runs(phase, d, machine)
        case Cut.ROWS:
            first = min(d.split.rank * d.own_logit_rows, d.bucket.logit_rows)
            row = np.arange(first, min(first + d.own_logit_rows, d.bucket.logit_rows), dtype=np.int32)
            return PhaseTasks(
                phase, {"row": row, "rows": np.ones_like(row)}, row // _logit_block(d, machine), d.split.rank
            )
        case Cut.TILES:
            return _tiles(phase, d, machine, panel)
        case Cut.PLACES:
            return _places(phase, d, machine, panel)
        case Cut.SLOTS:
            heads = (t for t in before if t.phase.result is Result.HEADS and t.rank == d.split.rank)
            return _attention(phase, next(heads, None), d)
        case Cut.NEVER:
            raise AssertionError(f"{phase.operation.name} is a control operation, which has no tile tasks")


def _idle(phase: Phase, d: Dims) -> bool:
    """Whether the rank `d.rank` has no work in a phase: it has no heads, or none of the weights that ranks divide."""
    return {Result.PARTIAL: phase.inner(d.split), Result.HEADS: d.split.rank_heads}.get(phase.result, 1) == 0


def _logit_block(d: Dims, machine: Machine) -> int:
    return min(machine.tiles.rows, d.bucket.logit_rows)


def _blocks(phase: Phase, d: Dims, machine: Machine) -> _Blocks:
    """Return the row blocks (groups of consecutive rows) that the rank `d.rank` computes in a phase (operation)."""
    if phase.rows in (Rows.LOGIT, Rows.SAMPLED):
        length = _logit_block(d, machine)
        return _Blocks(d.bucket.logit_rows, length, np.arange(ceil_div(d.bucket.logit_rows, length), dtype=np.int32))
    numbers = np.arange(d.bucket.row_blocks, dtype=np.int32)
    if phase.rows is Rows.OWN and not d.split.replicated_residual:
        numbers = numbers[d.owner(numbers * d.bucket.row_block) == d.split.rank]
    return _Blocks(d.bucket.tokens, d.bucket.row_block, numbers)


def _runs(phase: Phase, d: Dims, machine: Machine) -> PhaseTasks:
    """Cut an operation on whole rows, such as a norm: each task gets some consecutive rows. There are enough tasks for
    all workers if there are enough rows. Tasks have nearly equal numbers of rows, each inside one row block."""
    rows = _blocks(phase, d, machine)
    at_most = max(1, ceil_div(len(rows), machine.workers))
    pieces = ceil_div(rows.length, min(at_most, rows.length))
    cuts = np.arange(pieces + 1, dtype=np.int32) * rows.length // pieces
    start = (rows.numbers[:, None] * rows.length + cuts[:-1]).ravel()
    count = np.minimum(np.tile(np.diff(cuts), len(rows.numbers)), rows.total - start)
    start, count = start[count > 0], count[count > 0]
    columns = {"row": start, "rows": count}
    if "cols" in phase.operands:
        width = BUFFERS[given(phase.output)].shape(d, 0)[-1]
        columns |= {"col": np.zeros_like(start), "cols": np.full_like(start, width)}
    return PhaseTasks(phase, columns, start // rows.length, d.split.rank)


def _tiles(phase: Phase, d: Dims, machine: Machine, panel: int) -> PhaseTasks:
    """Cut a matmul: each row block is divided into column tiles of nearly equal width. Tiles start at multiples of the
    number of columns that the hardware computes at once, and of a head's width if heads must not be cut."""
    rows, unit = _blocks(phase, d, machine), max(machine.tiles.col_unit, output_columns(phase, d))
    unit = math.lcm(unit, d.model.head_dim) if phase.whole_heads(d.model) else unit
    blocks, first = len(rows.numbers), {"row": int(rows.numbers[:1].sum()) * rows.length, "rows": rows.length}
    cuts = _column_cuts(phase, first, (blocks, rows.length), unit, d, machine, panel)
    at = np.repeat(rows.numbers, len(cuts) - 1)
    columns = {
        "row": at * rows.length,
        "rows": np.minimum(rows.length, rows.total - at * rows.length),
        "col": np.tile(cuts[:-1], blocks),
        "cols": np.tile(np.diff(cuts), blocks),
    }
    return PhaseTasks(phase, columns, at, d.split.rank)


def _places(phase: Phase, d: Dims, machine: Machine, panel: int) -> PhaseTasks:
    """Cut the matmuls of a mixture of experts into column tiles, for each value of the operand `place`, which selects
    an expert. In a tile of one row, place j is the row's j-th expert; in a tile of all rows, the rank's expert j."""
    length, starts = (d.bucket.tokens, 1) if d.by_expert else (1, d.bucket.tokens)
    blocks, first = (starts * d.places, max(1, round(length * share(d)))), {"row": 0, "rows": length, "place": 0}
    cuts = _column_cuts(phase, first, blocks, machine.tiles.col_unit, d, machine, panel)
    row, place, tile = (a.ravel().astype(np.int32) for a in np.indices((starts, d.places, len(cuts) - 1)))
    columns = {"row": row, "rows": np.full_like(row, length), "col": cuts[tile], "cols": np.diff(cuts)[tile]}
    return PhaseTasks(phase, columns | {"place": place}, row // d.bucket.row_block, d.split.rank)


def _column_cuts(
    phase: Phase,
    start: Mapping[str, int],
    row_blocks: tuple[int, int],
    unit: int,
    d: Dims,
    machine: Machine,
    panel: int,
) -> NDArray[np.int32]:
    """Return the columns at which tiles begin, and the end of the last one. The number of tiles per row block minimises
    the time of a phase: the number of waves × the seconds of the widest tile. In a wave, each worker computes one tile.
    `row_blocks` has two numbers: of row blocks, and of rows in each. Widths are nearly equal multiples of `unit`.
    `start` has the other operands of a tile of the first block.

    A tile holds at most tiles.rows × tiles.cols outputs. So tiles of short row blocks may be wide. Tiles are narrower
    than this limit only to occupy all workers or to fill the last wave. If the row blocks form several panels (groups
    that share a pass over the weights), workers that are idle in the last wave begin the next phase. Then a partial
    wave counts only as the fraction of workers that it uses."""
    (blocks, rows), cols = row_blocks, phase.width(d.split)
    if not blocks or not cols:
        return np.zeros(1, dtype=np.int32)
    units = ceil_div(cols, unit)
    widest = max(1, machine.tiles.rows * machine.tiles.cols // (rows * unit))
    fewest = ceil_div(units, widest)
    most = min(units, 2 * max(fewest, ceil_div(machine.workers, blocks)))
    counts = np.arange(fewest, most + 1)
    width = np.minimum(-(-units // counts) * unit, cols).astype(np.int32)
    zero = np.zeros_like(width)
    first = {name: zero + value for name, value in start.items()} | {"col": zero, "cols": width}
    tile = seconds(phase, first, d, machine)
    waves = np.maximum(1.0, counts * blocks / machine.workers)
    if blocks <= panel_blocks(d, machine, panel):
        waves = np.ceil(waves)
    best = int(counts[np.argmin(waves * tile)])
    return np.minimum(np.arange(best + 1) * units // best * unit, cols).astype(np.int32)


def _attention(phase: Phase, heads: PhaseTasks | None, d: Dims) -> PhaseTasks:
    """Return the attention tasks of a rank: one instruction per attention slot, the list of work that the step's inputs
    assign to it. `heads` are the tasks that compute q, k and v. Attention waits for these tasks separately for each
    group of KV heads, and a task of `heads` signals every group to which it contributes. Small groups let attention
    begin earlier, but the signals of a task must fit into its encoded instruction. So the groups are the smallest that
    fit. One signal stays free for a phase that overwrites the task's inputs, such as the RoPE table."""
    slot = np.arange(d.bucket.attention_slots if heads else 0, dtype=np.int32)
    columns = {name: np.zeros_like(slot) for name in phase.operands} | {"slot": slot}
    if heads:
        first = heads.block == heads.block[0]
        tiles = {name: c[first] for name, c in heads.columns.items()}
        sizes = range(1, d.split.rank_kv_heads + 1)
        groups = (head_groups(heads.phase, tiles, phase, d, n).sum(axis=1).max() for n in sizes)
        group_heads = next(n for n, most in zip(sizes, groups, strict=True) if most < SIGNALS)
        columns["group_heads"] += group_heads
        columns["groups"] += ceil_div(d.split.rank_kv_heads, group_heads)
    return PhaseTasks(phase, columns, np.zeros_like(slot), d.split.rank)
