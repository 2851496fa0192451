"""Questions about one chip."""

from __future__ import annotations

from ..errors import MegakernelError
from ..machine import OPERAND_BYTES, Hardware
from . import book
from .ask import Figures, question

_GHZ = 1e9


@question(
    "chip",
    *(1, 2, 5, 6, 24, 31, 39),
    what="the figures of a chip: lanes, rates of arithmetic, sizes and rates of memories, rates of links",
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
        "vector_without_multiply_add_per_s": book.vector_ops_per_s(c, clock),
        "hbm_bytes": c.hbm_bytes,
        "read_from_hbm_bytes_per_s": c.hbm_bytes_per_s,
        "egress_bytes_per_s": machine.link.egress_bytes_per_s,
        "gpus_of_a_node": node.gpus,
        "node_egress_bytes_per_s": node.egress_bytes_per_s,
        "flops_per_byte_of_egress": book.alpha_node(machine),
        "flops_per_byte_beyond_the_node": book.alpha_beyond(machine),
        "usd_per_hour": c.usd_per_hour,
    }
    if machine.name in book.ON_CHIP:
        found |= zip(("shared_memory_bytes", "registers_bytes"), book.on_chip_bytes(machine), strict=True)
    return found


@question(
    "intensity",
    *(3, 30),
    what="how many FLOPs per byte, and how many rows of a matmul, make arithmetic take longer than memory",
    formula="C / W FLOPs per byte; C b / (2 W) rows, with b bytes per weight",
)
def intensity(machine: Hardware, dtype: str = "bf16", weight_bytes: float | None = None) -> Figures:
    _operand(dtype)
    vector = book.vector_ops_per_s(machine.chip, machine.clock_hz)
    return {
        "flops_per_byte": machine.intensity(dtype),
        "critical_rows": machine.critical_rows(dtype, weight_bytes),
        "vector_without_multiply_add_per_byte": vector / machine.chip.hbm_bytes_per_s,
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
    times = book.matmul(machine, rows, inner_size, cols, dtype)
    return _times(times) | ({"part_of_the_measured_time": times.seconds / seconds} if seconds else {})


@question(
    "vector-add",
    *(7, 30),
    what="least time to add two fp32 vectors",
    formula="max(N / (lanes x clock), 12 N / W); SMs without elements are idle",
)
def vector_add(machine: Hardware, elements: int, clock_ghz: float | None = None) -> Figures:
    return _times(book.vector_add(machine, elements, clock_ghz * _GHZ if clock_ghz else machine.clock_hz))


@question(
    "warps",
    29,
    what="how many warps fit on an SM at once, given the registers of a thread",
    formula="min(64, 65,536 / (32 x registers of a thread))",
)
def warps(registers: int) -> Figures:
    if registers > book.MOST_REGISTERS:
        raise MegakernelError(f"a thread has at most {book.MOST_REGISTERS} registers, not {registers}")
    return {"resident_warps": book.resident_warps(registers)}


@question(
    "offload",
    41,
    what="time to read all weights once over the link to the host, if they are in the host's memory",
    formula="bytes / W, where W is the rate of PCIe or NVLink-C2C",
)
def offload(machine: Hardware, bytes: float) -> Figures:
    return {"pass_s": book.host_pass_s(machine, bytes), "from_its_own_memory_s": bytes / machine.chip.hbm_bytes_per_s}


def _times(times: book.Times) -> Figures:
    bound = "arithmetic" if times.math_binds else "memory"
    return {"least_s": times.seconds, "arithmetic_s": times.math_s, "memory_s": times.moving_s, "bound": bound}


def _operand(dtype: str) -> None:
    if dtype not in OPERAND_BYTES:
        raise MegakernelError(f"{dtype!r} is not an operand type: use --dtype {', '.join(OPERAND_BYTES)}")
