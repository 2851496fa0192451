"""The seam between an engine and an executor: weights and state bound once, one launch per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import StepTable
from ..program import Program
from ..trace import Trace


class Logits(Protocol):
    """Rows of logits: an array, or what is copied from a device when it is read."""

    def __getitem__(self, rows: Any, /) -> Any: ...

    def copy(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Output:
    """What one launch leaves for the host. Arrays are the launch's own until the next one; copy to keep."""

    tokens: NDArray[np.int32]  # [logit_rows]
    logprobs: NDArray[np.float32]  # [logit_rows]
    logits: Logits  # [logit_rows, vocab], raw
    seconds: float  # wall time of the launch
    trace: Trace | None


class Launch(Protocol):
    """A launch under way."""

    def wait(self) -> Output:
        """Its outcome, once. Ctrl-C aborts it within a second; the next launch works."""

    def abort(self) -> None:
        """End it soon, and return when it has; its outcome is lost. Does nothing to a launch that has ended."""


class Backend(Protocol):
    """An executor with one model's weights and one KV pool.

    Made by `megakernel.runtime.create`. Programs of any bucket may be launched in any order; they must agree
    with the backend in every model dimension, page size and limit.
    """

    name: str

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> Launch:
        """Begin to execute one step. The launch before must have ended, by `wait` or `abort`."""

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """Set HISTORY[slot, start : start + len(tokens)]; between launches."""

    def close(self) -> None:
        """Abort what runs, release threads and memory. Further launches are errors."""
