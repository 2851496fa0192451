"""Compiled programs: their contents, their file format, and the checks that every program must pass."""

from .checks import check
from .file import load_program, program_from_bytes
from .program import SEGMENTS, VERSION, Program, Segment
