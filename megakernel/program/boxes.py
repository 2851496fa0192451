"""Checks that a program's instructions stay inside their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..isa import BUFFERS, Access, Buffer, Dims, Index, Phase, accesses
from .form import Part
from .phases import Ints, all_dims


def extent(buffer: Buffer, dims: Dims) -> tuple[int, int]:
    """The number of rows and of columns in a rank's copy of a buffer, as `Access` counts them."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return dims.tokens, dims.kv_cols
    rows, *cols = BUFFERS[buffer].shape(dims, 0)
    return rows, cols[0] if cols else 1


@dataclass(frozen=True)
class Use:
    """The instructions of one phase on one rank, with all regions of buffers that they read or write."""

    part: Part
    phase: Phase
    dims: Dims
    rows: Ints
    accesses: list[Access]


def uses(parts: list[Part]) -> list[Use]:
    """Group the instructions of each part (a decoded segment) by phase and rank. Joins and drains are left out."""
    out = []
    program = parts[0].program
    dims = all_dims(program.dims)
    for part in parts:
        key = part.number.astype(np.int64) * program.ranks + part.rank
        order = np.argsort(key, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
            if not len(rows):
                continue
            phase, d = part.phases.by_number[int(part.number[rows[0]])], dims[part.rank[rows[0]]]
            if not phase.control:
                out.append(Use(part, phase, d, rows, accesses(phase, phase.columns(part.records[rows]), d)))
    return out


def check_boxes(found: list[Use]) -> Iterator[str]:
    """Check that all regions that instructions read or write lie inside their buffers, and that each
    rank uses only its own rows of the residual.
    """
    every = [(use, access) for use in found for access in use.accesses]
    if not every:
        return
    length = [len(use.rows) for use, _ in every]
    row, row_end, col, col_end = (
        np.concatenate([getattr(a, name) for _, a in every]) for name in ("row", "row_end", "col", "col_end")
    )
    height, width = np.repeat(np.array([extent(a.buffer, use.dims) for use, a in every]), length, axis=0).T
    bad = (row < 0) | (row_end > height) | (col < 0) | (col_end > width)
    bad &= (row != row_end) & (col != col_end)
    bad |= (row_end < row) | (col_end < col)
    for i in np.nonzero(bad)[0]:
        which = int(np.searchsorted(np.cumsum(length), i, side="right"))
        use, access = every[which]
        label = use.part.label(int(use.rows[i - sum(length[:which])]))
        yield f"{label}: its box lies outside {access.buffer.name} [{height[i]}, {width[i]}]"
    for use in found:
        if use.dims.tp > 1 and not use.dims.replicated_residual:
            yield from _check_owners(use)


def _check_owners(use: Use) -> Iterator[str]:
    """Check that a rank uses only its own row blocks of the residual. Also check that each
    instruction on the residual or on partial sums has rows of only one row block, because partial
    sums are stored by row block.
    """
    d, phases = use.dims, use.part.phases
    residual = any(a.buffer in phases.residual and a.index is Index.NONE for a in use.accesses)
    if not residual and all(a.buffer not in phases.partial for a in use.accesses):
        return
    columns = use.phase.columns(use.part.records[use.rows])
    first, last = columns["row"], columns["row"] + columns["rows"] - 1
    for row in use.rows[first // d.row_block != last // d.row_block]:
        yield f"{use.part.label(int(row))}: its rows lie in more than one row block"
    if residual:
        for row in use.rows[d.owner(first) != d.rank]:
            yield f"{use.part.label(int(row))}: another rank has these rows of the residual"
