"""The questions that `megakernel roofline ask` answers, each with its inputs, formula, source and function."""

from . import chips, networks, parallelism
from .examples import EXAMPLES
from .question import NEEDED, QUESTIONS, Input, Question

__all__ = ["EXAMPLES", "NEEDED", "QUESTIONS", "Input", "Question", "chips", "networks", "parallelism"]
