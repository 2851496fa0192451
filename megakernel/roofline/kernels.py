"""Where the arithmetic of a matmul takes as long as reading its weights."""

from __future__ import annotations

from ..machine import Hardware

# Bytes of an operand, by the name of its rate.
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "fp32": 4.0}


def critical_rows(hardware: Hardware, dtype: str = "bf16") -> float:
    """Rows of a matmul above which reading its weights once takes less time than its arithmetic: C b / (2 W)."""
    return hardware.intensity(dtype) * OPERAND_BYTES[dtype] / 2
