"""How close a step comes to the limits of the machine, and what these limits allow.

`work` and `ceilings` are about steps that have run, and `program_step` is about the phases of a compiled program. The
other modules need no program. They estimate collectives, layouts of a model over GPUs, plans (all possible layouts) and
fleets of servers.
"""

from . import ask_chip, ask_model, ask_network
from .ask import QUESTIONS, Question
from .ceilings import QUIET, Ceilings, Measured, machine_ceilings, measure
from .examples import EXAMPLES
from .fit import memory_fit
from .fleet import Serving, best, fleet
from .layout import Layout, LayoutTime
from .plan import asked, plan
from .plot import Mark, Point, render_plot
from .program_step import Part, StepRoofline, step_roofline
from .shapes import SHAPES, Shape, shape_of
from .work import Work, achieved, bound, fraction_error, step_work

__all__ = [
    "EXAMPLES",
    "QUESTIONS",
    "QUIET",
    "SHAPES",
    "Ceilings",
    "Layout",
    "LayoutTime",
    "Mark",
    "Measured",
    "Part",
    "Point",
    "Question",
    "Serving",
    "Shape",
    "StepRoofline",
    "Work",
    "achieved",
    "ask_chip",
    "ask_model",
    "ask_network",
    "asked",
    "best",
    "bound",
    "fleet",
    "fraction_error",
    "machine_ceilings",
    "measure",
    "memory_fit",
    "plan",
    "render_plot",
    "shape_of",
    "step_roofline",
    "step_work",
]
