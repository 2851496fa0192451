"""Which instruction, on which worker, after what?"""

from .compile import compile_program
from .describe import describe
from .disasm import disassemble
from .options import Options
from .simulate import Simulation, simulate
from .verify import Report, verify

__all__ = [
    "Options",
    "Report",
    "Simulation",
    "compile_program",
    "describe",
    "disassemble",
    "simulate",
    "verify",
]
