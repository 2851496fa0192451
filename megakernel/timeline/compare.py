"""Compares two traces: predicted and measured, or before and after a change.

An instruction in one trace matches an instruction in the other if phase name, operands, layer, rank and launch are
equal. Worker and time may differ. So two programs can be compared even if they assign work to workers differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import MegakernelError
from ..isa import Phase
from ..isa import record as rec
from ..program import Program
from ..trace import IntervalKind
from .resolve import Resolved
from .spans import Floats, Ints


@dataclass(frozen=True)
class PhaseChange:
    """The mean computing time of one phase's matching instructions in each trace, and the ratio second / first."""

    name: str
    count: int
    first_mean_s: float
    second_mean_s: float
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two traces. `step_s` has the step's time in each trace, and `ratio` is second / first.
    `instructions` compares the instructions that are in both traces."""

    first: str
    second: str
    step_s: tuple[float, float]
    ratio: float | None
    matched: int
    only_first: int
    only_second: int
    instructions: list[PhaseChange]


def compare(first: Resolved, second: Resolved) -> Comparison:
    """Compare two traces. Raises MegakernelError if no instruction is in both."""
    phases, places = in_common((first.program, second.program))
    (one, before), (two, after) = (_executed(*each) for each in zip((first, second), places, strict=True))
    mine, theirs = match(one, two)
    if not len(mine):
        raise MegakernelError("the two traces have no instruction in common: compare steps of one model and bucket")
    changes = []
    places_of = one[mine, 0]
    for place in np.unique(places_of).tolist():
        here = places_of == place
        means = float(before[mine[here]].mean()), float(after[theirs[here]].mean())
        changes.append(PhaseChange(phases[place].name, int(here.sum()), *means, _ratio(*means)))
    steps = (first.step_s, second.step_s)
    return Comparison(
        first=first.trace.header.source,
        second=second.trace.header.source,
        step_s=steps,
        ratio=_ratio(*steps),
        matched=len(mine),
        only_first=len(one) - len(mine),
        only_second=len(two) - len(mine),
        instructions=sorted(changes, key=lambda c: -c.count * c.first_mean_s),
    )


def in_common(programs: Sequence[Program]) -> tuple[list[Phase], list[Ints]]:
    """Return all phases of several programs, one for each name. For each program, also return an array that maps the
    number of a phase to its index in this list."""
    forwards = [program.forward.by_number.values() for program in programs]
    phases = {phase.name: phase for forward in forwards for phase in forward}
    place = {name: at for at, name in enumerate(phases)}
    return list(phases.values()), [np.array([-1, *(place[phase.name] for phase in forward)]) for forward in forwards]


def match(one: Ints, two: Ints) -> tuple[Ints, Ints]:
    """Return where two arrays have equal rows, as indices into each array. Repetitions inside an array are ignored."""
    _, at = np.unique(np.concatenate([one, two]), axis=0, return_inverse=True)
    _, mine, theirs = np.intersect1d(at.ravel()[: len(one)], at.ravel()[len(one) :], return_indices=True)
    order = np.argsort(mine)
    return mine[order], theirs[order]


def identity(resolved: Resolved, rows: Ints, places: Ints) -> Ints:
    """Return numbers [intervals, words] that identify the instruction of each interval whose index is in `rows`. They
    are equal for the same instruction in both traces. `places` maps a phase's number to its index in a common list."""
    words = resolved.records[resolved.record[rows]]
    operands = words[:, rec.OPERAND_WORD : rec.OPERAND_WORD + rec.OPERANDS]
    own = (places[resolved.number], resolved.segment, resolved.rows["layer"], resolved.rows["rank"], resolved.launch)
    return np.concatenate([np.stack([c[rows].astype(np.int64) for c in own], axis=1), operands], axis=1)


def _executed(resolved: Resolved, places: Ints) -> tuple[Ints, Floats]:
    """Return two arrays: the identity of each executed instruction, and its computing time in seconds. Joins, drains
    and instructions without a COMPUTE interval are left out."""
    chosen = np.flatnonzero(resolved.kind(IntervalKind.COMPUTE) & ~resolved.control)
    _, first, at = np.unique(resolved.instance[chosen], return_index=True, return_inverse=True)
    seconds = np.bincount(at, resolved.length[chosen]).astype(np.float64) * resolved.tick_s
    return identity(resolved, chosen[first], places), seconds


def _ratio(first: float, second: float) -> float | None:
    return second / first if first else None
