"""What an instruction costs on a machine, in seconds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..isa import Column, Dims, Instruction, itemsize
from ..machine import Machine


def seconds(instruction: Instruction, columns: dict[str, Column], dims: Dims, machine: Machine) -> NDArray[np.float64]:
    """[n] predicted seconds of each instruction on one worker, which has an even share of the machine's rates.

    Loads overlap arithmetic inside a worker, so the slower of the two counts. Attention's work is in the step
    table; here it costs its dispatch only.
    """
    share = float(machine.workers)
    cost = instruction.cost(columns, dims)
    arithmetic = cost.matrix_flops * (share / machine.matrix_flops) + cost.vector_flops * (share / machine.vector_flops)
    memory = cost.memory_bytes * (share / machine.memory_bytes_per_s)
    total: NDArray[np.float64] = np.maximum(arithmetic, memory) + machine.dispatch_s
    return total


def panel_blocks(dims: Dims, machine: Machine) -> int:
    """Row blocks that share one pass over the weights: enough rows to be bound by arithmetic, not by memory.

    R rows of a matmul take 2 R / F seconds per weight and its b bytes take b / B, so R >= b F / 2 B.
    """
    rows = itemsize(dims) * machine.matrix_flops / (2 * machine.memory_bytes_per_s)
    return math.ceil(rows / dims.row_block)
