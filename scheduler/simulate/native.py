"""Python declarations (ctypes) of the native simulator in csrc/simulate."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.library import load, structure
from megakernel.scheduler.simulate.costs import TaskCosts
from megakernel.trace import DTYPE, Intervals

_I32, _I64, _F64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
Int32s = NDArray[np.int32]
Floats = NDArray[np.float64]

_structure = functools.partial(structure, "simulate/simulate.h")
WAIT, RECORD, TASK, SIGNAL = (np.dtype(_structure(name)) for name in ("Wait", "Record", "Task", "Signal"))
EVERY_RANK = -1


@dataclass(frozen=True)
class Work:
    """The input of the native simulator, which becomes its struct Program (csrc/simulate/simulate.h). `records` has the
    instructions of all workers and queues, and the offsets say where each worker's instructions begin."""

    ranks: int
    workers: int
    layers: int
    counters: int
    queues: int
    splits: int
    keys: int
    layered_keys: int
    prologue: Int32s  # offsets
    body: Int32s
    epilogue: Int32s
    queue_records: Int32s
    totals_first: Int32s
    totals_middle: Int32s
    totals_last: Int32s
    records: NDArray[np.void]
    tasks: NDArray[np.void]
    stores: Floats  # [tasks, ranks]
    waits: NDArray[np.void]
    signals: NDArray[np.void]
    key_bytes: Floats  # [ranks, keys]


@functools.cache
def _library() -> ctypes.CDLL:
    lib = load()
    lib.mk_simulate.restype = _I32
    structs = (ctypes.POINTER(_structure(name)) for name in ("Program", "Costs", "Stall"))
    lib.mk_simulate.argtypes = [*structs, _I32, _F64, _POINTER, _I64, ctypes.POINTER(_structure("Result"))]
    return lib


def run(
    work: Work,
    costs: TaskCosts,
    stall: tuple[int, int, int, float],
    most: int,
    most_s: float = inf,
    further_layers: int = 0,
) -> tuple[ctypes.Structure, Intervals]:
    """Simulate one step of `work`. `stall` delays one instruction: (segment, number of the instruction, layer,
    seconds). The result's `step_s` includes `further_layers` more layers, each of which takes as long as the second
    one. It is infinity if a step takes `most_s` seconds or more. Returns the result (the struct Result) and up to
    `most` intervals of the trace, in the order in which they ended."""
    lists = work.prologue, work.body, work.epilogue, work.queue_records
    totals = work.totals_first, work.totals_middle, work.totals_last
    counted = {"record": work.records, "task": work.tasks, "wait": work.waits, "signal": work.signals}
    arrays: dict[str, NDArray[Any]] = {f"{name}s": array for name, array in counted.items()}
    arrays |= {"stores": work.stores, "key_bytes": work.key_bytes}
    program = _structure("Program")(
        offsets=tuple(array.ctypes.data for array in lists),
        totals=tuple(array.ctypes.data for array in totals),
        **{f.name: getattr(work, f.name) for f in fields(Work) if f.type == "int"},
        **{name: array.ctypes.data for name, array in arrays.items()},
        **{f"{name}_count": len(array) for name, array in counted.items()},
    )
    kind = _structure("Costs")
    native = kind(*(getattr(costs, name) for name, _ in kind._fields_))
    intervals = np.empty(most, dtype=DTYPE)
    result = _structure("Result")()
    to = intervals.ctypes.data if most else None
    status = _library().mk_simulate(
        program, native, _structure("Stall")(*stall), further_layers, most_s, to, most, result
    )
    if status:
        raise MegakernelError("out of memory while simulating a program: simulate it on a machine with more memory")
    return result, intervals[: min(most, result.intervals)]
