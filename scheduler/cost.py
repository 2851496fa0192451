"""The cost model: predicted seconds of an instruction on a machine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Column, Dims, Phase, Units, cost, itemsize, link_bytes
from megakernel.isa.operations.spec import Cost
from megakernel.machine import Machine
from megakernel.program import Program
from megakernel.targets.pages import tile_work


def seconds(phase: Phase, columns: dict[str, Column], dims: Dims, machine: Machine) -> NDArray[np.float64]:
    """Return the predicted seconds of each instruction of a phase (an operation, such as the QKV projection) on one
    worker, with shape [n]. `columns` has the instructions' operands. A worker gets an equal share of the machine's
    rates. Loads overlap arithmetic inside a worker, so only the longer of the two counts. An attention instruction
    costs only its dispatch here, because the amount of attention depends on the step, which the compiler does not
    know."""
    share = float(machine.workers)
    work = cost(phase, columns, dims)
    memory = work.memory_bytes * (share / machine.memory_bytes_per_s)
    return np.maximum(_arithmetic(phase, columns, dims, machine, work), memory) + machine.costs.dispatch_s


def phase_seconds(phase: Phase, columns: dict[str, Column], dims: Dims, machine: Machine) -> float:
    """Return the predicted seconds in which a rank executes all its instructions of a phase, if its workers have no
    other work. A phase is an operation, such as the QKV projection. Arithmetic, memory and links overlap. Memory time
    is that of the whole rank at full bandwidth: if only few workers read, each gets more than an equal share. The
    latency of one signal is added, or of two signals if the phase stores to other ranks."""
    work = cost(phase, columns, dims)
    arithmetic = _arithmetic(phase, columns, dims, machine, work) + machine.costs.dispatch_s
    memory, link = _traffic_seconds(phase, columns, dims, machine, work)
    busy = max(float(arithmetic.sum()) / machine.workers, float(arithmetic.max()))
    return max(busy, memory, link) + machine.costs.signal_s * (2 if link else 1)


def step_seconds(program: Program, machine: Machine) -> float:
    """Return the predicted seconds of a step of `program`: the sum over rank 0's phases, which run one after another.
    Attention costs only its dispatch here, because the amount of attention depends on the step's inputs."""
    total = 0.0
    for index, runs in enumerate((1, program.dims.model.layers, 1)):
        for phase, dims, _, columns in program.by_phase(index):
            if dims.split.rank == 0 and not phase.control:
                total += runs * phase_seconds(phase, columns, dims, machine)
    return total


def unit_seconds(phase: Phase, columns: dict[str, Column], dims: Dims, machine: Machine) -> tuple[float, float, float]:
    """Return how many seconds a rank's instructions of a phase occupy its arithmetic units, its memory and its link."""
    work = cost(phase, columns, dims)
    arithmetic = float(_arithmetic(phase, columns, dims, machine, work).sum()) / machine.workers
    return arithmetic, *_traffic_seconds(phase, columns, dims, machine, work)


def _traffic_seconds(
    phase: Phase, columns: dict[str, Column], dims: Dims, machine: Machine, work: Cost
) -> tuple[float, float]:
    memory = float(work.memory_bytes.sum()) / machine.memory_bytes_per_s
    return memory, float(link_bytes(phase, columns, dims).sum()) / machine.link_bytes_per_s


def _arithmetic(
    phase: Phase, columns: dict[str, Column], dims: Dims, machine: Machine, work: Cost
) -> NDArray[np.float64]:
    share = float(machine.workers)
    if phase.is_matmul and dims.worker.units == Units.TENSOR:
        rows, cols = (columns[name].astype(np.int64) for name in ("rows", "cols"))
        flops, loads = tile_work(phase, rows, cols, dims)
        matrix, cache = flops / machine.matrix_flops, loads / machine.cache_bytes_per_s
        tiles: NDArray[np.float64] = share * np.maximum(matrix, cache)
        return tiles
    # GPUs compute routers and experts as dot products, also in programs whose matmuls use tensor cores.
    dots = not phase.is_matmul and dims.worker.units != Units.CORE
    matrix_flops = machine.vector_flops if dots else _matmul_flops(dims, machine)
    return work.matrix_flops * (share / matrix_flops) + work.vector_flops * (share / machine.vector_flops)


def _matmul_flops(dims: Dims, machine: Machine) -> float:
    return machine.vector_flops if dims.worker.units == Units.DOTS else machine.matrix_flops


def balanced_rows(dims: Dims, machine: Machine) -> float:
    """Return for how many rows R a matmul's arithmetic takes as long as reading its weights. At F FLOP/s, R rows take
    2 R / F seconds per weight. At B bytes/s, the b bytes of a weight take b / B seconds. So R = b F / (2 B)."""
    return itemsize(dims.model) * _matmul_flops(dims, machine) / (2 * machine.memory_bytes_per_s)


def panel_blocks(dims: Dims, machine: Machine, panel: int) -> int:
    """Return the number of row blocks in a panel, a group of row blocks that share one pass over the weights. The panel
    is made so large that arithmetic, not memory, is the limit. If `panel` is not 0, it is the result."""
    return panel or min(math.ceil(balanced_rows(dims, machine) / dims.bucket.row_block), dims.bucket.row_blocks)
