"""Chooses the fastest way to compile a step for a machine."""

from megakernel.scheduler.tune.fastest import Fastest
from megakernel.scheduler.tune.search import Found, search

__all__ = ["Fastest", "Found", "search"]
