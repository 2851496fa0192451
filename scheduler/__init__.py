"""The compiler. It turns a model's forward pass into a program: the instructions of a step, the worker (an SM or a CPU
core) that runs each of them, and their order."""

from megakernel.scheduler.compile import compile_program
from megakernel.scheduler.cost import step_seconds
from megakernel.scheduler.describe import describe
from megakernel.scheduler.disasm import disassemble
from megakernel.scheduler.options import Options
from megakernel.scheduler.spec import MOST_MASKS, Spec
