"""JOIN, a control operation."""

from .spec import control

JOIN = control(
    "waits for counters, then adds to others, and computes nothing; merges waits where an instruction would need more "
    "than eight, and synchronises ranks at the end of a launch"
)
