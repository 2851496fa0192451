"""Checks a program before anything executes it. The checks look at each record, not at the order of records.

Code that reads a program without violations never reads outside the program's arrays.
`scheduler.verify` begins with the same checks and also proves that the program computes what its
phases define, and that it ends.
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
    """Describe the first violation and where it is. Returns None if there is none."""
    return next((violation for stage in _stages(program) for violation in stage), None)


def _stages(program: Program) -> Iterator[Iterable[str]]:
    """Yield the checks in order. Each check relies on the previous ones."""
    yield check_layout(program)
    yield check_phases(program.forward, program.dims)
    parts = [Part(program, name) for name in SEGMENTS]
    yield check_records(program, parts)
    yield check_boxes(uses(parts))
