"""Which instruction, on which worker, after what?"""

from .compile import compile_program

__all__ = ["compile_program"]
