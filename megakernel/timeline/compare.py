"""Two traces side by side: predicted and measured, or before and after a change.

The counterpart of an executed instruction has the same name, operands, layer, rank and launch, wherever it was placed
and whenever it ran. So programs of one bucket that were compiled differently can be compared as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BY_OPCODE, Family
from ..isa import record as rec
from ..program import Program
from ..trace import IntervalKind, Trace
from .resolve import Resolved, resolve


@dataclass(frozen=True)
class InstructionChange:
    """COMPUTE time of the matched instructions of one name: mean of both, and second / first."""

    name: str
    count: int
    first_mean_s: float
    second_mean_s: float
    ratio: float | None


@dataclass(frozen=True)
class PhaseChange:
    """First begin and last end of one (layer, instruction) over all workers, in seconds since its launch began."""

    layer: int | None
    instruction: str
    first_s: tuple[float, float]
    second_s: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """`step_s` of both and their ratio, second / first; of `instructions` only those with a counterpart are timed.

    `phases` are of the last launch, in the order in which the first trace began them.
    """

    first: str
    second: str
    step_s: tuple[float, float]
    ratio: float | None
    matched: int
    only_first: int
    only_second: int
    instructions: list[InstructionChange]
    phases: list[PhaseChange]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Executed:
    """Executed instructions: identity [n, words] int64, opcode, layer (-1: none), COMPUTE ticks, begin, end, launch."""

    key: NDArray[np.int64]
    opcode: NDArray[np.int64]
    layer: NDArray[np.int64]
    seconds: NDArray[np.float64]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    launch: NDArray[np.int64]


def compare(first: tuple[Program, Trace], second: tuple[Program, Trace]) -> Comparison:
    """All of it; MegakernelError if a trace does not fit its program or the two have no instruction in common."""
    a, b = resolve(*first), resolve(*second)
    one, two = _executed(a), _executed(b)
    mine, theirs = match(one.key, two.key)
    if not len(mine):
        raise MegakernelError("the two traces have no instruction in common: compare steps of one model and bucket")
    changes = []
    for op in np.unique(one.opcode[mine]).tolist():
        here = one.opcode[mine] == op
        before, after = (float(e.seconds[i[here]].mean()) for e, i in ((one, mine), (two, theirs)))
        name, count = BY_OPCODE[op].name, int(here.sum())
        changes.append(InstructionChange(name, count, before, after, _ratio(before, after)))
    steps = (_step_s(a), _step_s(b))
    return Comparison(
        first=first[1].header.source,
        second=second[1].header.source,
        step_s=steps,
        ratio=_ratio(*steps),
        matched=len(mine),
        only_first=len(one.key) - len(mine),
        only_second=len(two.key) - len(mine),
        instructions=sorted(changes, key=lambda c: -c.count * c.first_mean_s),
        phases=_phases(one, two),
    )


def match(one: NDArray[np.int64], two: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the two arrays that are equal: indices into both. Of equal rows in one array the first counts."""
    both, at = np.unique(np.concatenate([one, two]), axis=0, return_inverse=True)
    found = np.full((2, len(both)), -1, dtype=np.int64)
    for side, ids in enumerate((at.ravel()[: len(one)], at.ravel()[len(one) :])):
        found[side][ids[::-1]] = np.arange(len(ids))[::-1]
    shared = (found >= 0).all(axis=0)
    order = np.argsort(found[0][shared])
    return found[0][shared][order], found[1][shared][order]


def identity(resolved: Resolved, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows, words] what an executed instruction shares with its counterpart."""
    words = resolved.records[resolved.record[rows]]
    operands = words[:, rec.OPERAND_WORD : rec.OPERAND_WORD + rec.OPERANDS]
    own = (resolved.opcode, resolved.segment, resolved.rows["layer"], resolved.rows["rank"], resolved.launch)
    return np.concatenate([np.stack([c[rows].astype(np.int64) for c in own], axis=1), operands], axis=1)


def _executed(resolved: Resolved) -> _Executed:
    """Of every instance with a COMPUTE that is not control; those of one identity may be several (none in practice)."""
    control = [op for op, i in BY_OPCODE.items() if i.family is Family.CONTROL]
    chosen = np.flatnonzero(resolved.kind(IntervalKind.COMPUTE) & ~np.isin(resolved.opcode, control))
    instances, first, at = np.unique(resolved.instance[chosen], return_index=True, return_inverse=True)
    rows = chosen[first]
    tick = resolved.trace.header.tick_s
    begin = np.full(len(instances), np.inf)
    end = np.zeros(len(instances))
    ticks = np.bincount(at, (resolved.end - resolved.begin)[chosen])
    np.minimum.at(begin, at, resolved.begin[chosen])
    np.maximum.at(end, at, resolved.end[chosen])
    origin = resolved.launch_spans()[0][resolved.launch[rows]]
    return _Executed(
        key=identity(resolved, rows),
        opcode=resolved.opcode[rows],
        layer=np.where(resolved.segment[rows] == 1, resolved.rows["layer"][rows].astype(np.int64), -1),
        seconds=(ticks * tick).astype(np.float64),
        begin=((begin - origin) * tick).astype(np.float64),
        end=((end - origin) * tick).astype(np.float64),
        launch=resolved.launch[rows],
    )


def _phases(one: _Executed, two: _Executed) -> list[PhaseChange]:
    spans = []
    for e in (one, two):
        last = e.launch == e.launch.max()
        pairs, at = np.unique(np.stack([e.layer[last], e.opcode[last]]), axis=1, return_inverse=True)
        begin, end = np.full(pairs.shape[1], np.inf), np.zeros(pairs.shape[1])
        np.minimum.at(begin, at.ravel(), e.begin[last])
        np.maximum.at(end, at.ravel(), e.end[last])
        names = [(int(layer), int(op)) for layer, op in pairs.T]
        spans.append(dict(zip(names, zip(begin.tolist(), end.tolist(), strict=True), strict=True)))
    first, second = spans
    shared = sorted((k for k in first if k in second), key=lambda k: first[k])
    return [
        PhaseChange(None if layer < 0 else layer, BY_OPCODE[op].name, first[layer, op], second[layer, op])
        for layer, op in shared
    ]


def _step_s(resolved: Resolved) -> float:
    first, last = resolved.launch_spans()
    return float((last - first).mean()) * resolved.trace.header.tick_s


def _ratio(first: float, second: float) -> float | None:
    return second / first if first else None
