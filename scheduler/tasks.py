"""The data that the parts of the compiler exchange: the instructions of a step, before workers are assigned to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from megakernel.isa import Column, Dims, Forward, Phase
from megakernel.machine import Machine

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PhaseTasks:
    """All instructions of one phase (operation) on one rank, as operand columns of equal length. `block` is the row
    block that contains a task's rows; tasks of the same row block have the same dependencies. Blocks divide the token
    rows or, in the epilogue, the rows that get logits."""

    phase: Phase
    columns: dict[str, Column]
    block: Column
    rank: int = 0

    def __len__(self) -> int:
        return len(self.block)

    @cached_property
    def content(self) -> Hashable:
        """A key for what the tasks compute. It omits the phase's name and number, which may differ in equal phases."""
        columns = b"".join(self.columns[name].tobytes() for name in self.phase.operands)
        return replace(self.phase, name="", number=0), columns, self.block.tobytes()


@dataclass(frozen=True, eq=False)
class Tasks:
    """All instructions of a step, in three segments: prologue, layer and epilogue. Each segment lists its phases
    (operations) in program order, and for each phase the tasks of all ranks. `machine` has the number of workers and
    the tile sizes of this program."""

    dims: Dims
    forward: Forward
    machine: Machine
    segments: tuple[list[PhaseTasks], list[PhaseTasks], list[PhaseTasks]]  # prologue, body, epilogue


class Stages:
    """The results of stages of the compiler, kept for further programs that differ from the first only in options."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, stage: Callable[[], T]) -> T:
        """Return the result of `stage`, which is called only the first time. `key` names the stage and its inputs."""
        if key not in self._known:
            self._known[key] = stage()
        known: T = self._known[key]
        return known


def ordinals(tasks: list[PhaseTasks]) -> list[int]:
    """Return, for each element of `tasks`, the position of its phase among the segment's phases that have tasks."""
    changes = [a.phase.number != b.phase.number for a, b in itertools.pairwise(tasks)]
    return list(itertools.accumulate(changes, initial=0))
