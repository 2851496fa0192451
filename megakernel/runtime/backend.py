"""The interface of backends. A backend has a model's weights and KV cache, and runs each step as one launch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..isa import Buffer, StepTable
from ..model.checkpoint import Checkpoint
from ..program import Program
from ..trace import Trace


class HostRows(Protocol):
    """Rows of an output: an array, or an object that copies rows from a device when they are read."""

    def __getitem__(self, rows: Any, /) -> Any: ...


@dataclass
class Output:
    """The results of a launch, in host memory. The next launch overwrites the arrays, so copy those that you keep."""

    tokens: NDArray[np.int32]  # [logit_rows]
    logprobs: NDArray[np.float32]  # [logit_rows]
    logits: HostRows  # [logit_rows, vocab], before penalties, temperature and other sampling parameters
    hidden: HostRows  # [logit_rows, hidden], the output of the final norm, in the compute dtype (bfloat16 as uint16)
    seconds: float  # wall time of the launch
    trace: Trace | None


class Launch(Protocol):
    """A running launch."""

    def wait(self) -> Output:
        """Wait until the launch ends, and return its output. Call it once. Ctrl-C aborts the launch within a second."""

    def abort(self) -> None:
        """Stop this launch and all launches queued after it. Returns when they have stopped; their output is lost. Does
        nothing if this launch has ended."""


class Backend(Protocol):
    """Executes programs with one model's weights and one KV cache. `megakernel.runtime.create` returns a Backend.

    A backend can run several programs, in any order. They may be compiled for different numbers of token rows, but must
    have the backend's model sizes, KV page size and limits.
    """

    name: str
    queues: bool  # whether a launch may be started while another runs, to run after it

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> Launch:
        """Start to execute one step. The previous launch must have ended, by `wait` or `abort`. If `queues` is
        true, that launch may still run, but the one before it must have ended."""

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        """Execute one step: `start`, then `wait`."""
        return self.start(program, table, trace=trace).wait()

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        """Store tokens of a sequence in HISTORY[slot, start : start + len(tokens)]. Allowed only between launches."""

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        """Replace the weights of these pairs (buffer, layer), in the same memory. Allowed only between launches."""

    def close(self) -> None:
        """Abort a running launch, and release threads and memory. Further launches are errors."""
