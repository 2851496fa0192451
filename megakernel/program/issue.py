"""Estimates how long a worker's roles (its specialised warps) take to issue the machine
instructions of an instruction, however fast memory and arithmetic units are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import Dims, Operation, Phase, Units, ceil_div, matmul_pages
from ..isa.pages import CHUNK, DOT_PIECE, K_STEP, PIECES
from ..isa.record import Column
from ..machine import Issue

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Roles:
    """The time that each role needs for each instruction, in the unit of the `Issue` from which it
    is computed (cycles or seconds). The roles work at the same time.
    """

    weight_loader: Floats
    input_loader: Floats
    consumers: Floats

    @property
    def loaders(self) -> Floats:
        """The time of the slower loader."""
        return np.maximum(self.weight_loader, self.input_loader)


def matmul_issue(phase: Phase, rows: Column, cols: Column, dims: Dims, issue: Issue) -> Roles:
    """The issue times of matmul instructions with tiles of `rows` x `cols` outputs."""
    pages = matmul_pages(phase, rows, cols, dims)
    columns = phase.matrices(dims) * cols.astype(np.int64)
    consumers: NDArray[np.floating]
    if dims.units == Units.DOTS:
        weight_page, input_page = issue.weight_page, issue.input_page
        units = ceil_div(columns, 2 * PIECES)
        pair = np.where(rows > 1, issue.dot_pairs + (rows - 2) * issue.dot_row, issue.dot_pair)
        consumers = units * (ceil_div(phase.inner(dims), DOT_PIECE) * pair + issue.dot_unit)
    else:
        # With two SMs, each loads half of the weights.
        weight_page = (issue.tile_page + (dims.sms - 1) * issue.pass_page) / dims.sms
        input_page = issue.tile_page
        consumers = ceil_div(columns, CHUNK) * ceil_div(phase.inner(dims), K_STEP) * issue.k_step
    return Roles(
        pages.weights * weight_page + pages.inputs * issue.pass_page,
        pages.inputs * input_page + pages.weights * issue.pass_page,
        np.asarray(consumers, np.float64),
    )


def sample_steps(dims: Dims, issue: Issue) -> int:
    """The number of groups into which `sample` divides the logits of a row. While it adds one
    group, it loads the next.
    """
    return ceil_div(dims.vocab, int(issue.sample_entries))


def issued(phase: Phase, columns: dict[str, Column], dims: Dims, issue: Issue) -> Roles | None:
    """The issue times of a phase's instructions; None if the program does not use a ring of pages,
    and for operations other than matmul and sample, whose issue times are not modelled.
    """
    if not dims.ring_pages:
        return None
    if phase.is_matmul:
        return matmul_issue(phase, columns["rows"], columns["cols"], dims, issue)
    if phase.operation is Operation.SAMPLE:
        rows = columns["rows"].astype(np.float64)
        return Roles(0 * rows, 0 * rows, rows * (sample_steps(dims, issue) * issue.sample_step))
    return None
