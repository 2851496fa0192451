"""DRAIN, a control operation."""

from .spec import control

DRAIN = control(
    "repeatedly claims the next instruction of the rank's queue and runs it (its waits, work and signals), until "
    "workers have claimed the queue's first `end` instructions in this layer"
)
