"""Python declarations (ctypes) of the native simulator in csrc/simulate."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.library import load, structure
from megakernel.scheduler.simulate.costs import TaskCosts
from megakernel.trace import DTYPE, Intervals

Int32s = NDArray[np.int32]
Floats = NDArray[np.float64]

_structure = functools.partial(structure, "simulate/simulate.h")
WAIT, RECORD, TASK, SIGNAL = (np.dtype(_structure(name)) for name in ("Wait", "Record", "Task", "Signal"))
EVERY_RANK = -1


@dataclass(frozen=True)
class Work:
    """The input of the native simulator, which becomes its struct Program (csrc/simulate/simulate.h). `records` has the
    instructions of all workers and queues. `offsets` say where each worker's instructions begin in the prologue, the
    body and the epilogue, and where each queue's instructions begin."""

    sizes: dict[str, int]
    offsets: list[Int32s]
    totals: list[Int32s]
    records: NDArray[np.void]
    tasks: NDArray[np.void]
    waits: NDArray[np.void]
    signals: NDArray[np.void]
    stores: Floats  # [tasks, ranks]
    key_bytes: Floats  # [ranks, keys]


def run(
    work: Work, costs: TaskCosts, most: int, most_s: float = inf, further_layers: int = 0
) -> tuple[ctypes.Structure, Intervals]:
    """Simulate one step of `work`. The result's `step_s` includes `further_layers` more layers, each of which takes as
    long as the second one. `step_s` is infinity if a step takes `most_s` seconds or more. Returns the result (the
    struct Result) and up to `most` intervals of the trace, in the order in which they ended."""
    arrays = ("records", "tasks", "waits", "signals", "stores", "key_bytes")
    program = _structure("Program")(
        offsets=tuple(array.ctypes.data for array in work.offsets),
        totals=tuple(array.ctypes.data for array in work.totals),
        **work.sizes,
        **{name: getattr(work, name).ctypes.data for name in arrays},
    )
    kind = _structure("Costs")
    native = kind(*(getattr(costs, name) for name, _ in kind._fields_))
    intervals = np.empty(most, dtype=DTYPE)
    result = _structure("Result")()
    to = intervals.ctypes.data if most else None
    structs = map(ctypes.byref, (program, native))
    status = load().mk_simulate(*structs, further_layers, most_s, to, most, ctypes.byref(result))
    if status:
        raise MegakernelError("out of memory while simulating a program: simulate it on a machine with more memory")
    return result, intervals[: min(most, result.intervals)]
