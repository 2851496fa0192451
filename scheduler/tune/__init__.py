"""Chooses the fastest way to compile a step for a machine."""

from megakernel.scheduler.tune.fastest import Fastest
