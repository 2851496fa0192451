"""Which instruction, on which worker, after what?"""

from .choose import settle
from .compile import compile_program
from .describe import describe
from .disasm import disassemble
from .options import Options
from .verify import Report, verify

__all__ = ["Options", "Report", "compile_program", "describe", "disassemble", "settle", "verify"]
