"""What is the hardware? `Machine` is what a compiler needs of one device, `Hardware` everything that is known."""

from .device import HOST, MACHINES, Machine, cpu_count, hardware, host, host_hardware, load, processor
from .hardware import Chip, Costs, Curve, Fabric, Hardware, Level, Link, Node, Parts, Rates, Tiles

__all__ = [
    "HOST",
    "MACHINES",
    "Chip",
    "Costs",
    "Curve",
    "Fabric",
    "Hardware",
    "Level",
    "Link",
    "Machine",
    "Node",
    "Parts",
    "Rates",
    "Tiles",
    "cpu_count",
    "hardware",
    "host",
    "host_hardware",
    "load",
    "processor",
]
