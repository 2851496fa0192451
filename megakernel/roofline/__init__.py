"""Computes the least time that the hardware allows for a step (the roofline), and compares measured times with it.

`work` and `ceilings` are about steps that have run. `program_step` is about compiled programs. `ask` needs no program:
it answers questions about chips, networks and parallelism.
"""

from .ceilings import QUIET, Ceilings, Measured, machine_ceilings, measure, read_rate
from .program_step import LeastTimes, PhasePart, step_roofline
from .work import StepWork, attended, bound, fraction_error, memory_fit, step_work
