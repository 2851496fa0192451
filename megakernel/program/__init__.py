"""Declares programs: arrays, files, checks."""

from .program import VERSION, Program
from .segments import SEGMENTS, Segment

__all__ = ["SEGMENTS", "VERSION", "Program", "Segment"]
