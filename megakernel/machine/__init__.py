"""Describes hardware. A `Machine` is one device as the compiler sees it; `Hardware` is a whole machine file."""

from .device import CPU, MACHINES, Machine, host, host_hardware, load
from .files import HOST, hardware
from .hardware import ONE_ROW, OPERAND_BYTES, Chip, Core, Hardware, Level, Path
from .host import cpu_count, processor
