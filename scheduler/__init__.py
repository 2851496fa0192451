"""The compiler. It turns a model's forward pass into a program: the instructions of a step, the worker (an SM or a CPU
core) that runs each of them, and their order."""

from megakernel.scheduler.candidates import MOST_MASKS, with_matmul
from megakernel.scheduler.compile import compile_program
from megakernel.scheduler.cost import step_seconds
from megakernel.scheduler.describe import describe
from megakernel.scheduler.disasm import disassemble
from megakernel.scheduler.options import Options

__all__ = ["MOST_MASKS", "Options", "compile_program", "describe", "disassemble", "step_seconds", "with_matmul"]
