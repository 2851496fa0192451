"""Compiles a model's forward pass into programs: which instruction runs on which worker, and in which order."""

from .candidates import MOST_MASKS, with_matmul
from .compile import compile_program
from .cost import step_seconds
from .describe import describe
from .disasm import disassemble
from .options import Options

__all__ = ["MOST_MASKS", "Options", "compile_program", "describe", "disassemble", "step_seconds", "with_matmul"]
