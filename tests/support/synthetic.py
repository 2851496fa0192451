"""Makes small programs and traces for tests of the timeline. Traces are listed by hand or simulated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import handmade
import numpy as np
from mutate import with_phases
from simulated import step_of

from megakernel import machine
from megakernel.isa import Dims, Dtype, StepTable
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.program import Program
from megakernel.scheduler.simulate import run as simulating
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.simulate.costs import TaskCosts, costs_of
from megakernel.scheduler.simulate.native import Work
from megakernel.trace import DTYPE, IntervalKind, Role, Trace, TraceHeader

Streams = Sequence[Sequence[Records]]


def dims(layers: int = 2, tokens: int = 64, row_block: int = 32, slots: int = 4, **changes: float) -> Dims:
    sizes = {"vocab": 1024, "hidden": 128, "ffn": 512, "head_dim": 32, "logit_rows": 4, "max_seqs": 4}
    sizes |= {"dtype": int(Dtype.BF16), "max_context": 256, "items": slots, "attention_slots": slots, "partials": 0}
    return handmade.small_dims(**sizes | {"layers": layers, "tokens": tokens, "row_block": row_block} | changes)


def record(
    name: str, operands: Sequence[int] = (), waits: Sequence[int] = (), signals: Sequence[int] = (), tp: int = 1
) -> Records:
    """Return a record for the phase `name` of a Llama on `tp` ranks. Waits and signals are `counter_word` values."""
    phase = handmade.llama(dims(tp=tp)).by_name[name]
    return handmade.record(phase, *operands, waits=waits, signals=signals)


def program(d: Dims, prologue: Streams, body: Streams, epilogue: Streams, *, counters: int, ranks: int = 1) -> Program:
    """Return a program with these instruction streams. Each segment lists its streams by rank, then by worker. The
    totals of the program's counters are zero, because the timeline does not read totals."""
    zeros = np.zeros((ranks, counters), dtype=np.int32)
    segments = [handmade.segment(*streams) for streams in (prologue, body, epilogue)]
    sizes = ranks, len(body) // ranks, counters
    return Program(d.changed(tp=ranks), handmade.llama(d), "host", *sizes, *segments, *[zeros] * 3)


def llama(layers: int = 2, workers: int = 4, row_blocks: int = 2, tiles: int = 4) -> Program:
    """Return a small program with all phases of a Llama. A projection whose output is added to the residual has `tiles`
    tiles per row block."""
    sizes = {"vocab": 256, "ffn": 256, "heads": 2, "kv_heads": 1, "items": 8 * row_blocks}
    d = dims(layers, tokens=32 * row_blocks, slots=2 * row_blocks, **sizes)
    return handmade.handmade(d, workers, tile=-(-d.model.hidden // tiles))


@contextmanager
def delayed(segment: int, number: int, seconds: float) -> Iterator[None]:
    """Let one instruction, the record `number` of a segment, take longer in simulations; in the body, in each layer."""
    make_work = simulating.make_work

    def make(program: Program, table: StepTable, costs: TaskCosts) -> Work:
        work = make_work(program, table, costs)
        record = work.records[work.offsets[segment][0] + number]
        work.tasks["compute_s"][record["end_task"] - 1] += seconds
        return work

    with mock.patch.object(simulating, "make_work", make):
        yield


def _simulated(p: Program, target: machine.Machine, costs: TaskCosts) -> Trace:
    """Return a simulated trace of a step that uses all token rows of `p`, without intervals of instruction fetches."""
    target = replace(target, workers=p.workers)
    done = simulate(p, target, step_of(p), costs=costs, trace=True)
    assert done.trace is not None
    return replace(done.trace, intervals=done.trace.intervals[done.trace.intervals["kind"] != IntervalKind.FETCH])


SIGNAL_NS = 300


def run(p: Program) -> Trace:
    """Return a simulated trace of CPU workers, whose tiles take tens of microseconds."""
    host = machine.host(p.workers)
    rates = {"matmul_flops": ((1.0, 1e10),), "attention_flops": ((1.0, 1e9),), "vector_flops": 1e8}
    rates |= {"memory_bytes_per_s": 1e12, "cache_bytes_per_s": 1e12}
    costs = replace(costs_of(host), **rates, dispatch_s=200e-9, signal_s=SIGNAL_NS * 1e-9, launch_s=0.0)
    return _simulated(p, host, costs)


def stalled() -> tuple[Program, Trace]:
    """Return a program of three layers, and a trace in which one instruction of the LM head stalls for 5 ms."""
    p = llama(layers=3)
    heads = rec.phase_number(p.epilogue.records) == p.forward.by_name["lm_head"].number
    with delayed(2, int(np.flatnonzero(heads)[1]), 5e-3):
        return p, run(p)


def renumbered(p: Program, t: Trace) -> tuple[Program, Trace]:
    """Add a phase at the start of a program, so that the number of every phase changes. Return the new program, and `t`
    as a trace of it."""
    first = replace(p.forward.prologue[0], name="more", number=0)
    other = with_phases(p, [[first, *p.forward.prologue], list(p.forward.body), list(p.forward.epilogue)])
    return other, replace(t, header=replace(t.header, program=other.hash))


def trace(p: Program, rows: Sequence[tuple[int, ...]], *, dropped: int = 0, tick_s: float = 1e-9) -> Trace:
    """Return a trace with one interval per row. A row has the fields of DTYPE in order. Sorts the intervals by rank,
    worker and begin, because a trace must have this order."""
    intervals = np.array([tuple(r) for r in rows], dtype=DTYPE)
    intervals = intervals[np.lexsort((intervals["begin"], intervals["worker"], intervals["rank"]))]
    header = TraceHeader(p.hash, "simulator", tick_s, read_s=0.0, clock_error_s=0.0, dropped=dropped)
    return Trace(header, intervals)


def node(
    ranks: int = 8, workers: int = 132, layers: int = 2, slow: float = 1.0, clock_error_s: float = 0.0
) -> tuple[Program, Trace]:
    """Return a program for layers of the size of a 70B model on a node's GPUs, and its simulated trace. The intervals
    name the roles of a worker's warps, as on a GPU. Matmuls take `slow` times as long as on an H100. With the default
    arguments the trace has more than 400,000 intervals."""
    sizes = {"hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128, "vocab": 8192}
    limits = {"slots": 4 * workers, "items": 9 * workers, "max_context": 8192, "tp": ranks}
    p = handmade.handmade(dims(layers, 64 * workers, 128, **sizes, **limits), workers, tile=320)
    h100 = machine.load("h100")
    costs = costs_of(h100)
    costs = replace(costs, matmul_flops=tuple((rows, rate / slow) for rows, rate in costs.matmul_flops))
    trace = _simulated(p, h100, costs)
    trace.intervals["role"][trace.intervals["kind"] == IntervalKind.COUNTER_WAIT] = Role.INPUT_LOADER  # as on a GPU
    return p, replace(trace, header=replace(trace.header, clock_error_s=clock_error_s))
