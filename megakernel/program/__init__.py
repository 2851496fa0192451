"""Compiled programs: their arrays, their file format, and the checks that every program must pass."""

from .program import VERSION, Program
from .segments import SEGMENTS, Segment

__all__ = ["SEGMENTS", "VERSION", "Program", "Segment"]
