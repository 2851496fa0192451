"""Python declarations (ctypes) of the native simulator in csrc/simulate."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, fields
from math import inf

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.library import load
from megakernel.scheduler.simulate.costs import TaskCosts
from megakernel.trace import DTYPE, Intervals

_I32, _I64, _F64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
Int32s = NDArray[np.int32]
Floats = NDArray[np.float64]

WAIT = np.dtype([("counter", np.int32), ("slot", np.int32)])  # as the C++ struct mk::simulate::Wait
RECORD = np.dtype([(name, np.int32) for name in (
    "number", "phase", "first_task", "end_task", "queue", "claims_end",
)])  # the layout of mk::simulate::Record  # fmt: skip
TASK = np.dtype([
    *((name, np.float64) for name in (
        "weight_bytes", "read_bytes", "ring_bytes", "held_bytes", "output_bytes", "ahead_bytes", "ask_s", "compute_s",
        "tail_s", "start_s", "end_s",
    )),
    *((name, np.int32) for name in (
        "weight_key", "read_key", "write_key", "split", "parts", "first_wait", "end_wait", "first_signal", "end_signal",
        "unused",
    )),
])  # the layout of mk::simulate::Task  # fmt: skip
SIGNAL = np.dtype([(name, np.int32) for name in ("rank", "counter", "next", "arrivals")])  # mk::simulate::Signal
EVERY_RANK = -1


@dataclass(frozen=True)
class Work:
    """The input of the native simulator (mk::simulate::Program). `records` has the instructions of all workers and
    queues, and the offsets say where each worker's instructions begin."""

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


_COUNTED = ("records", "tasks", "waits", "signals")


class _Program(ctypes.Structure):
    _fields_ = (
        *((f.name, _I32 if f.type == "int" else _POINTER) for f in fields(Work)),
        *((f"{name}_count", _I32) for name in _COUNTED),
    )


_COSTS = (
    "memory_bytes_per_s", "cache_bytes_per_s", "cache_bytes", "worker_bytes_per_s", "egress_bytes_per_s",
    "switch_bytes_per_s", "latency_s", "store_s", "dispatch_s", "claim_s", "signal_s", "remote_signal_s", "launch_s",
    "window_bytes", "ring_bytes",
)  # fmt: skip


class _Costs(ctypes.Structure):
    _fields_ = (
        *((name, _F64) for name in _COSTS),
        *((name, _I32) for name in ("in_flight", "claim_in_flight", "roles")),
    )


class _Stall(ctypes.Structure):
    _fields_ = (("segment", _I32), ("number", _I32), ("layer", _I32), ("seconds", _F64))


class SimulationResult(ctypes.Structure):
    """mk::simulate::Result."""

    _fields_ = (
        *((name, _F64) for name in ("step_s", "memory_bytes", "cache_bytes", "link_bytes")),
        *((name, _I64) for name in ("events", "intervals")),
        *((name, _I32) for name in ("stuck_stream", "stuck_record", "stuck_layer", "crowded_counter")),
    )  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    lib = load()
    lib.mk_simulate.restype = _I32
    lib.mk_simulate.argtypes = [
        ctypes.POINTER(_Program), ctypes.POINTER(_Costs), ctypes.POINTER(_Stall), _I32, _F64, _POINTER, _I64,
        ctypes.POINTER(SimulationResult),
    ]  # fmt: skip
    return lib


def run(
    work: Work,
    costs: TaskCosts,
    stall: tuple[int, int, int, float],
    most: int,
    most_s: float = inf,
    further_layers: int = 0,
) -> tuple[SimulationResult, Intervals]:
    """Simulate one step of `work`. `stall` delays one instruction: (segment, number of the instruction, layer,
    seconds). The result's `step_s` includes `further_layers` more layers, each of which takes as long as the second
    one. It is infinity if a step takes `most_s` seconds or more. Returns the result and up to `most` intervals of the
    trace, in the order in which they ended."""
    values = {f.name: getattr(work, f.name) for f in fields(Work)}
    counts = {f"{name}_count": len(values[name]) for name in _COUNTED}
    program = _Program(**{name: v if isinstance(v, int) else v.ctypes.data for name, v in values.items()}, **counts)
    native = _Costs(
        *(getattr(costs, name) for name in _COSTS), costs.in_flight, costs.claim_in_flight, int(costs.roles)
    )
    intervals = np.empty(most, dtype=DTYPE)
    result = SimulationResult()
    to = intervals.ctypes.data if most else None
    status = _library().mk_simulate(program, native, _Stall(*stall), further_layers, most_s, to, most, result)
    if status == -2:
        raise MegakernelError(
            "a record of the program names a counter, a task or a queue that does not exist: verify the program"
        )
    if status:
        raise MegakernelError("out of memory while simulating a program: simulate it on a machine with more memory")
    return result, intervals[: min(most, result.intervals)]
