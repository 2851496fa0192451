"""The interface between an engine and a backend, which keeps weights and KV cache and runs each step as one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import StepTable
from ..program import Program
from ..trace import Trace


class HostRows(Protocol):
    """Rows of an output: an array, or data that is copied from a device when it is read."""

    def __getitem__(self, rows: Any, /) -> Any: ...

    def copy(self) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Output:
    """The results of a launch on the host. The next launch overwrites the arrays; copy them to keep them."""

    tokens: NDArray[np.int32]  # [logit_rows]
    logprobs: NDArray[np.float32]  # [logit_rows]
    logits: HostRows  # [logit_rows, vocab], without penalties, temperature or other sampling parameters
    hidden: HostRows  # [logit_rows, hidden], after the final norm, in the compute dtype (bfloat16 as uint16)
    seconds: float  # wall time of the launch
    trace: Trace | None


class Launch(Protocol):
    """A running launch."""

    def wait(self) -> Output:
        """Wait for the end and return the output. Call it once. Ctrl-C aborts the launch within a second."""

    def abort(self) -> None:
        """Stop the launch, and return when it has stopped; its output is lost. Does nothing if it has ended."""


class Backend(Protocol):
    """An executor with one model's weights and one KV pool.

    `megakernel.runtime.create` makes one. Programs of different buckets (numbers of token rows and similar sizes) may
    be launched in any order. A program must agree with the backend in every model dimension, page size and limit.
    """

    name: str

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> Launch:
        """Begin to execute one step. The previous launch must have ended, by `wait` or `abort`."""

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """Set HISTORY[slot, start : start + len(tokens)]. Allowed only between launches."""

    def close(self) -> None:
        """Abort a running launch; release threads and memory. Further launches are errors."""
