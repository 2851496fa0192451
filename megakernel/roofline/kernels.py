"""Time that one kernel must take on one chip: arithmetic against memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine import Hardware

# Bytes of an operand, by the name of its rate.
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "fp32": 4.0}


@dataclass(frozen=True)
class KernelTime:
    """Seconds of the two, which overlap; `bound` names the longer."""

    flops: float
    bytes: float
    math_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.math_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "math" if self.math_s > self.memory_s else "memory"

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.bytes


def matmul(hardware: Hardware, rows: int, inner: int, cols: int, dtype: str = "bf16") -> KernelTime:
    """[rows, inner] x [inner, cols]: both operands read and the result written once, in `dtype`."""
    flops = 2.0 * rows * inner * cols
    moved = OPERAND_BYTES[dtype] * (rows * inner + inner * cols + rows * cols)
    return KernelTime(flops, moved, flops / hardware.flops_per_s(dtype), moved / hardware.chip.hbm_bytes_per_s)


def vector_add(hardware: Hardware, elements: int, clock_hz: float) -> KernelTime:
    """Sum of two fp32 vectors: an operation per element, two reads and a write. Only SMs with elements compute."""
    chip = hardware.chip
    filled = chip.sms_filled(elements) / chip.sms
    moved = 3 * OPERAND_BYTES["fp32"] * elements
    math_s = elements / (chip.vector_ops_per_s(clock_hz) * filled)
    return KernelTime(float(elements), moved, math_s, moved / chip.hbm_bytes_per_s)


def weight_pass_s(weight_bytes: float, bytes_per_s: float) -> float:
    """Seconds to bring all weights once over a link, as each pass of a model whose weights are offloaded must."""
    return weight_bytes / bytes_per_s


def critical_rows(hardware: Hardware, dtype: str = "bf16") -> float:
    """Rows of a matmul above which reading its weights once takes less time than its arithmetic: C b / (2 W)."""
    return hardware.intensity(dtype) * OPERAND_BYTES[dtype] / 2
