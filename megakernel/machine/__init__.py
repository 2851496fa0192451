"""Describes hardware. A `Machine` is one device, as the compiler needs it; `Hardware` is all that is known."""

from .device import CPU, MACHINES, Machine, host, host_hardware, load
from .files import HOST, hardware
from .hardware import ONE_ROW, OPERAND_BYTES, Chip, Core, Hardware, Level, Path
from .host import cpu_count, processor
