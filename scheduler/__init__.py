"""Which instruction, on which worker, after what?"""

from .compile import compile_program
from .describe import describe
from .disasm import disassemble
from .verify import Report, verify

__all__ = ["Report", "compile_program", "describe", "disassemble", "verify"]
