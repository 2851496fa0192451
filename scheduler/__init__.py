"""Which instruction, on which worker, after what?"""

from .choose import settle
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
    "settle",
    "simulate",
    "verify",
]
