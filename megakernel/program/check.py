"""Checks a program before anything executes it: whether each record is valid, but not their order.

Code that reads a program without violations never reads outside the program's arrays.
`scheduler.verify` begins with the same stages, and also proves that the program computes the right
thing and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .boxes import check_boxes, uses
from .form import Part, check_layout, check_records
from .phases import check_phases
from .segments import SEGMENTS

if TYPE_CHECKING:
    from .program import Program


def first_violation(program: Program) -> str | None:
    """The first violation and its place, or None."""
    return next((violation for stage in _stages(program) for violation in stage), None)


def _stages(program: Program) -> Iterator[Iterable[str]]:
    """The checks in order. Each relies on the previous ones."""
    yield check_layout(program)
    yield check_phases(program.forward, program.dims)
    parts = [Part(program, name) for name in SEGMENTS]
    yield check_records(program, parts)
    yield check_boxes(uses(parts))
