"""Questions about one chip."""

from __future__ import annotations

from math import ceil

from ...errors import MegakernelError
from ...machine import OPERAND_BYTES, Hardware
from .question import Figures, known, question

_GHZ = 1e9
# Figures that only these questions need: sizes of an SM, and rates of links to the host from datasheets.
_REGISTERS_PER_SM, _WARPS_PER_SM, _THREADS_PER_WARP = 65536, 64, 32
# The maximum number of registers of one thread, according to the book "How to Scale Your Model".
_MOST_REGISTERS = 256
# For each SM: the bytes of shared memory and L1 cache together, and the number of 32-bit registers.
_ON_CHIP = {"h100": (262144, _REGISTERS_PER_SM), "tpu-v5p": (64e6, 32768)}
_HOST_LINK_BYTES_PER_S = {"h100": 64e9, "gh200": 450e9, "gb200-nvl72": 900e9}


def alpha_node(machine: Hardware) -> float:
    """Return the number of FLOPs (bf16) that a GPU can do in the time in which it sends one byte inside its node."""
    return machine.flops_per_s("bf16") / machine.link.egress_bytes_per_s


def alpha_beyond(machine: Hardware) -> float:
    """Return how many FLOPs (bf16) a GPU can do while its whole node sends one byte to other nodes.

    A single GPU's share of the network does not matter, because a collective sends each array out of a node only once.
    """
    return machine.flops_per_s("bf16") / machine.node.egress_bytes_per_s


@question(
    "chip",
    *(1, 2, 5, 6, 24, 31, 39),
    what="the figures of a chip: fp32 lanes (CUDA cores), rates of arithmetic, memories and links, sizes of memories",
    formula="lanes = SMs x sub-partitions x lanes of each; clock = fp32 FLOP/s / (2 x lanes)",
)
def chip(machine: Hardware, clock_ghz: float | None = None) -> Figures:
    c, node = machine.chip, machine.node
    clock = clock_ghz * _GHZ if clock_ghz else machine.clock_hz
    found: Figures = {
        "sms": c.sms,
        "subpartitions": c.subpartitions,
        "fp32_lanes": c.fp32_lanes,
        "clock_hz": clock,
        "clock_that_fp32_implies_hz": c.clock_for(machine.rates.fp32),
        "bf16_flops_per_s": machine.rates.bf16,
        "fp32_flops_per_s": machine.rates.fp32,
        "vector_without_multiply_add_per_s": c.fp32_lanes * clock,
        "hbm_bytes": c.hbm_bytes,
        "read_from_hbm_bytes_per_s": c.hbm_bytes_per_s,
        "egress_bytes_per_s": machine.link.egress_bytes_per_s,
        "gpus_of_a_node": node.gpus,
        "node_egress_bytes_per_s": node.egress_bytes_per_s,
        "flops_per_byte_of_egress": alpha_node(machine),
        "flops_per_byte_beyond_the_node": alpha_beyond(machine),
        "usd_per_hour": c.usd_per_hour,
    }
    if machine.name in _ON_CHIP:
        shared, registers = _ON_CHIP[machine.name]
        found |= {"shared_memory_bytes": c.sms * shared, "registers_bytes": c.sms * registers * 4.0}
    return found


@question(
    "intensity",
    *(3, 30),
    what="how many FLOPs per byte, and how many rows of a matmul, make arithmetic take longer than memory",
    formula="C / W FLOPs per byte; C b / (2 W) rows, with b bytes per weight",
)
def intensity(machine: Hardware, dtype: str = "bf16", weight_bytes: float | None = None) -> Figures:
    _operand(dtype)
    return {
        "flops_per_byte": machine.intensity(dtype),
        "critical_rows": machine.critical_rows(dtype, weight_bytes),
        "vector_without_multiply_add_per_byte": machine.chip.fp32_lanes
        * machine.clock_hz
        / machine.chip.hbm_bytes_per_s,
    }


@question(
    "matmul",
    *(4, 32),
    what="least time of the matmul [rows, inner] x [inner, cols], also as a fraction of a measured time",
    formula="max(2 m k n / C, (m k + k n + m n) b / W)",
)
def matmul(
    machine: Hardware, rows: int, inner_size: int, cols: int, dtype: str = "bf16", seconds: float | None = None
) -> Figures:
    _operand(dtype)
    moved = OPERAND_BYTES[dtype] * (rows * inner_size + inner_size * cols + rows * cols)
    math_s = 2.0 * rows * inner_size * cols / machine.flops_per_s(dtype)
    least_s = max(math_s, moved / machine.chip.hbm_bytes_per_s)
    part = {"part_of_the_measured_time": least_s / seconds} if seconds else {}
    return _times(machine, math_s, moved) | part


@question(
    "vector-add",
    *(7, 30),
    what="least time to add two fp32 vectors",
    formula="max(N / (lanes x clock), 12 N / W); SMs without elements are idle",
)
def vector_add(machine: Hardware, elements: int, clock_ghz: float | None = None) -> Figures:
    c = machine.chip
    clock = clock_ghz * _GHZ if clock_ghz else machine.clock_hz
    filled = min(c.sms, ceil(elements / (c.fp32_lanes // c.sms))) / c.sms
    return _times(machine, elements / (c.fp32_lanes * clock * filled), 3 * OPERAND_BYTES["fp32"] * elements)


@question(
    "warps",
    29,
    what="how many warps fit on an SM at once, given the registers of a thread",
    formula="min(64, 65,536 / (32 x registers of a thread))",
)
def warps(registers: int) -> Figures:
    if registers > _MOST_REGISTERS:
        raise MegakernelError(f"a thread has at most {_MOST_REGISTERS} registers, not {registers}")
    return {"resident_warps": min(_WARPS_PER_SM, _REGISTERS_PER_SM // (registers * _THREADS_PER_WARP))}


@question(
    "offload",
    41,
    what="time to read all weights once over the link to the host, if they are in the host's memory",
    formula="bytes / W, where W is the rate of PCIe or NVLink-C2C",
)
def offload(machine: Hardware, bytes: float) -> Figures:
    rate = known(_HOST_LINK_BYTES_PER_S, machine, "the link to the host")
    return {"pass_s": bytes / rate, "from_its_own_memory_s": bytes / machine.chip.hbm_bytes_per_s}


def _times(machine: Hardware, math_s: float, moved_bytes: float) -> Figures:
    """Return the seconds of arithmetic and of memory accesses, and the least time, which is the longer of the two."""
    moving_s = moved_bytes / machine.chip.hbm_bytes_per_s
    bound = "arithmetic" if math_s > moving_s else "memory"
    return {"least_s": max(math_s, moving_s), "arithmetic_s": math_s, "memory_s": moving_s, "bound": bound}


def _operand(dtype: str) -> None:
    if dtype not in OPERAND_BYTES:
        raise MegakernelError(f"{dtype!r} is not an operand type: use --dtype {', '.join(OPERAND_BYTES)}")
