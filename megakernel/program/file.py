"""Loads and checks program files."""

from __future__ import annotations

from pathlib import Path

from ..errors import MegakernelError, file_errors
from . import header
from .checks import check
from .program import SEGMENTS, TOTALS, Program, Segment

_SEGMENTS = (*SEGMENTS, "queues")
_ARRAYS = (*(f"{name}.{what}" for name in _SEGMENTS for what in ("records", "offsets")), *TOTALS)


def load_program(path: Path) -> Program:
    """Load a program file. Raises MegakernelError if it cannot be read, or if the program is not valid."""
    with file_errors(f"read program {path}"):
        return program_from_bytes(path.read_bytes(), str(path))


def program_from_bytes(data: bytes, name: str) -> Program:
    """The inverse of `Program.to_bytes`, with all checks. Error messages call the program `name`."""
    known, arrays = header.decode(data, name, _ARRAYS)
    shape = (known.ranks, known.counters)
    for total in TOTALS:
        if min(shape) < 1 or len(arrays[total]) != known.ranks * known.counters:
            raise MegakernelError(
                f"program {name} is damaged: {total} has {len(arrays[total])} words, not one for each of"
                f" {known.counters} counters of {known.ranks} ranks: compile it again"
            )
    prologue, body, epilogue, queues = (
        Segment(arrays[f"{part}.records"], arrays[f"{part}.offsets"]) for part in _SEGMENTS
    )
    first, middle, last = (arrays[total].reshape(shape) for total in TOTALS)
    program = Program(
        dims=known.dims,
        forward=known.forward,
        machine=known.machine,
        ranks=known.ranks,
        workers=known.workers,
        counters=known.counters,
        prologue=prologue,
        body=body,
        epilogue=epilogue,
        totals_first=first,
        totals_middle=middle,
        totals_last=last,
        queues=queues,
    )
    check(program, f"program {name}")
    return program
