"""Declares DRAIN, by which a worker claims instructions from a queue and runs them."""

from .spec import control

DRAIN = control(
    "repeatedly takes the next instruction from the rank's queue and runs it, until all workers together have taken "
    "the queue's first `end` instructions in this layer"
)
