"""Estimates a lower limit of an instruction's time: how long the warps of a worker need to issue its machine
instructions. The instruction takes at least this long, however fast memory and arithmetic are. Loader warps and
consumer warps count separately: loaders fill pages of shared memory, and consumers compute on these pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import Column, Dims, Operation, Phase, Units, ceil_div
from ..machine import ONE_ROW, Path
from .pages import CHUNK, DOT_PIECE, K_STEP, PIECES, matmul_pages, one_row

Floats = NDArray[np.float64]
SAMPLE_GROUP = 8192  # the number of logits that the warps process at once when they sample a token


def own_paths(dims: Dims, paths: dict[str, Path]) -> dict[str, Path]:
    """Return the times of paths (parts of the machine code) in the kernel that runs programs of these sizes."""
    of_row = {name.removeprefix(ONE_ROW): path for name, path in paths.items() if name.startswith(ONE_ROW)}
    return paths | of_row if one_row(dims) else paths


@dataclass(frozen=True)
class Roles:
    """The seconds that each kind of warp needs for each instruction. Different kinds work in parallel."""

    weight_loader: Floats
    input_loader: Floats
    consumers: Floats

    @property
    def loaders(self) -> Floats:
        """For each instruction, the time of the slower loader."""
        return np.maximum(self.weight_loader, self.input_loader)


def matmul_issue(phase: Phase, rows: Column, cols: Column, dims: Dims, paths: dict[str, Path]) -> Roles:
    """Return how long each kind of warp takes to issue matmul instructions, for tiles of `rows` x `cols` outputs."""
    one = {name: path.warm for name, path in paths.items()}
    columns = phase.matrices(dims.split) * cols.astype(np.int64)
    if dims.worker.units != Units.DOTS:
        steps = np.asarray(ceil_div(columns, CHUNK) * ceil_div(phase.inner(dims.split), K_STEP), np.float64)
        return Roles(steps * one["tile_step"], steps * one["tile_step"], steps * one["k_step"])
    pages = matmul_pages(phase, rows, cols, dims)
    pair = np.where(rows > 1, one["dot_pairs"] + (rows - 2) * one["dot_row"], one["dot_pair"])
    unit = ceil_div(phase.inner(dims.split), DOT_PIECE) * pair + one["dot_unit"]
    return Roles(
        pages.weights * one["weight_page"] + pages.inputs * one["pass_page"],
        pages.inputs * one["input_page"] + pages.weights * one["pass_page"],
        np.asarray(ceil_div(columns, 2 * PIECES) * unit, np.float64),
    )


def sample_steps(dims: Dims) -> int:
    """How many groups of SAMPLE_GROUP logits a row has. `sample` loads a group while it processes the previous one."""
    return ceil_div(dims.model.vocab, SAMPLE_GROUP)


def issued(phase: Phase, columns: dict[str, Column], dims: Dims, paths: dict[str, Path]) -> Roles | None:
    """Return the issue times of matmul or sample instructions. None for other operations, and for CPUs."""
    if not dims.worker.ring_pages:
        return None
    if phase.is_matmul:
        return matmul_issue(phase, columns["rows"], columns["cols"], dims, paths)
    if phase.operation is Operation.SAMPLE:
        rows = columns["rows"].astype(np.float64)
        return Roles(0 * rows, 0 * rows, rows * (sample_steps(dims) * paths["sample_step"].warm))
    return None
