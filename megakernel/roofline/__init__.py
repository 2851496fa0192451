"""How far a step is from the limits of the machine: necessary work, ceilings, and the fraction of them reached."""

from .ceilings import Ceilings, machine_ceilings, measure_ceilings
from .work import Achieved, Work, achieved, bound, fraction_error, step_work

__all__ = [
    "Achieved",
    "Ceilings",
    "Work",
    "achieved",
    "bound",
    "fraction_error",
    "machine_ceilings",
    "measure_ceilings",
    "step_work",
]
