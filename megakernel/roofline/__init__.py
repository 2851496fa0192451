"""Computes the least time of a step that the hardware allows (the roofline), and how close measured times come to it.

`work` and `ceilings` are about steps that have run, and `program_step` is about compiled programs. `ask` answers
questions about chips, networks and parallelism without a program.
"""

from .ceilings import QUIET, Ceilings, Measured, machine_ceilings, measure
from .fit import memory_fit
from .program_step import PhasePart, StepRoofline, step_roofline
from .work import StepWork, achieved, attended, bound, fraction_error, step_work

__all__ = [
    "QUIET",
    "Ceilings",
    "Measured",
    "PhasePart",
    "StepRoofline",
    "StepWork",
    "achieved",
    "attended",
    "bound",
    "fraction_error",
    "machine_ceilings",
    "measure",
    "memory_fit",
    "step_roofline",
    "step_work",
]
