"""JOIN, a control operation."""

from .spec import control

JOIN = control(
    "computes nothing: waits, then signals; used where an instruction needs more than eight waits, and to "
    "synchronise ranks at the end of a launch"
)
