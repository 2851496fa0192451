"""Which instruction, on which worker, after what?"""

from .compile import compile_program
from .describe import describe
from .disasm import disassemble

__all__ = ["compile_program", "describe", "disassemble"]
