"""What is the hardware? `Machine` is what a compiler needs of one device, `Hardware` everything that is known."""

from .device import HOST, MACHINES, Machine, cpu_count, hardware, host, host_hardware, load, processor
from .hardware import OPERAND_BYTES, Chip, Hardware, Issue, Level

__all__ = [
    "HOST",
    "MACHINES",
    "OPERAND_BYTES",
    "Chip",
    "Hardware",
    "Issue",
    "Level",
    "Machine",
    "cpu_count",
    "hardware",
    "host",
    "host_hardware",
    "load",
    "processor",
]
