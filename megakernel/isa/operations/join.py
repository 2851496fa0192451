"""Declares JOIN, which computes nothing, but waits for counters and then adds to others."""

from .spec import control

JOIN = control(
    "waits for counters, then adds to others, and computes nothing; merges waits where an instruction would need more "
    "than eight, and synchronises ranks at the end of a launch"
)
