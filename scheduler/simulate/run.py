"""Runs a program in virtual time, to predict how long a step takes on a machine, and why. docs/simulator.md has all
rules, and says what the simulator leaves out.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from megakernel.errors import MegakernelError
from megakernel.isa import StepTable, Units, slot_work
from megakernel.machine import Machine
from megakernel.program import Program, check
from megakernel.scheduler.simulate.costs import TaskCosts, costs_of
from megakernel.scheduler.simulate.native import Work, run
from megakernel.scheduler.simulate.work import make_work
from megakernel.targets.hopper import check_pages
from megakernel.targets.issue import own_paths
from megakernel.targets.launch import PAGE_BYTES
from megakernel.targets.pages import ROW_PAGES, one_row
from megakernel.trace import Trace, TraceHeader

_TICK_S = 1e-9
_INTERVALS_PER_TASK = 8  # fetch, two waits for pages, two loads, wait for counters, compute, store
_MOST_IN_FLIGHT = 7
_SIMULATED_LAYERS = 3  # in `extrapolated_seconds`; csrc/simulate/pace.h says why the second layer is measured


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated step. `step_s` is the time from the launch to the last event. Bytes are sums over all
    ranks. Data that the cache evicts, writes back to memory and loads again count each time.
    """

    step_s: float
    tokens_per_s: float
    memory_bytes: float
    cache_bytes: float
    link_bytes: float
    trace: Trace | None


def simulate(
    program: Program, machine: Machine, table: StepTable, *, costs: TaskCosts | None = None, trace: bool = False
) -> Simulation:
    """Simulate one step of `program` on `machine`. `table` has the step's inputs. `costs` defaults to those of the
    machine. With `trace`, the begin and end of all work is recorded, which takes about 200 bytes per instruction.

    Raises MegakernelError if the program never ends, or if a counter gets more signals than the program declares.
    """
    check(program)
    check_pages(program)
    work, costs = _prepared(program, machine, table, costs or costs_of(machine))
    most = _INTERVALS_PER_TASK * _launched(work) if trace else 0
    result, intervals = run(work, costs, most)
    _check(program, work, costs, result)
    kept = None
    if trace:
        order = np.lexsort((intervals["begin"], intervals["worker"], intervals["rank"]))
        header = TraceHeader(program.hash, "simulator", _TICK_S, 0.0, 0.0, dropped=0, machine=machine.name)
        kept = Trace(header, intervals[order], slot_work(table)[None])
    rows = int((table.row_seq >= 0).sum())
    return Simulation(
        step_s=result.step_s,
        tokens_per_s=rows / result.step_s,
        memory_bytes=result.memory_bytes,
        cache_bytes=result.cache_bytes,
        link_bytes=result.link_bytes,
        trace=kept,
    )


def extrapolated_seconds(program: Program, machine: Machine, table: StepTable, most_s: float = inf) -> float:
    """Return the predicted seconds of a step of `program`. Only few layers are simulated, because all layers are alike.
    If a step takes `most_s` seconds or more, the result may be infinity, because the simulation can then stop early.

    Raises MegakernelError as `simulate` does.
    """
    work, costs = _prepared(program, machine, table, costs_of(machine))
    layers = min(program.dims.model.layers, _SIMULATED_LAYERS)
    few = replace(work, sizes=work.sizes | {"layers": layers})
    result, _ = run(few, costs, 0, most_s, program.dims.model.layers - layers)
    if result.step_s < inf:
        _check(program, work, costs, result)
    return float(result.step_s)


def _own(program: Program, costs: TaskCosts) -> TaskCosts:
    """Return `costs` adapted to a program: paths through the GPU interpreter's code differ between its builds, and on
    GPUs, bytes in flight have a limit only if the program has dot products (csrc/cuda/loaders.h)."""
    if costs.paths:
        paths = own_paths(program.dims, costs.paths)
        signal_s = costs.signal_s + paths["hand_off"].cold - costs.paths["hand_off"].cold
        costs = replace(costs, paths=paths, signal_s=signal_s)
        if one_row(program.dims):
            costs = replace(costs, ring_bytes=float(ROW_PAGES * PAGE_BYTES))
    if program.dims.worker.units == Units.DOTS or not costs.window_bytes:
        return costs
    return replace(costs, window_bytes=costs.ring_bytes, ahead_bytes=0.0)


def _prepared(program: Program, machine: Machine, table: StepTable, costs: TaskCosts) -> tuple[Work, TaskCosts]:
    """Return the simulator's input, and `costs` adapted to the program. Raises MegakernelError if the machine does not
    fit the program."""
    if program.workers != machine.workers:
        raise MegakernelError(
            f"the program needs {program.workers} workers per rank, but {machine.name} has {machine.workers}:"
            " compile it for this machine"
        )
    assert 1 <= costs.claim_in_flight <= costs.in_flight <= _MOST_IN_FLIGHT
    costs = _own(program, costs)
    return make_work(program, table, costs), costs


def _launched(work: Work) -> int:
    """Return the number of tasks (instructions or pieces of attention work) in one launch, over all layers."""
    per_record = work.records["end_task"] - work.records["first_task"]
    first, body, last, queues = (int(per_record[offsets[0] : offsets[-1]].sum()) for offsets in work.offsets)
    return first + work.sizes["layers"] * (body + queues) + last


def _check(program: Program, work: Work, costs: TaskCosts, result: ctypes.Structure) -> None:
    # Without waits, attention items of different layers may signal the same counters at once, which is no error then.
    if result.crowded_counter >= 0 and costs.synchronised:
        raise MegakernelError(
            f"signals add more to counter {result.crowded_counter} than the total that the program states:"
            " check the program with megakernel verify"
        )
    if result.stuck_stream < 0:
        return
    rank, worker = divmod(result.stuck_stream, program.workers)
    record = work.records[result.stuck_record]
    name = program.forward.by_number[int(record["phase"])].name
    raise MegakernelError(
        f"the program never ends: rank {rank} worker {worker} waits at record"
        f" {record['number']} ({name}, layer {result.stuck_layer}); check the program with megakernel verify"
    )
