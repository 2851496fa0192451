"""Traces whose answers are known: by hand where a test says what happened, in virtual time otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import handmade
import numpy as np
from mutate import with_phases
from simulated import step_of

from megakernel import machine
from megakernel.isa import Dims, Dtype
from megakernel.isa.record import Records
from megakernel.program import Program
from megakernel.scheduler.simulate import Stall, simulate
from megakernel.scheduler.simulate.costs import Costs, costs_of
from megakernel.trace import DTYPE, IntervalKind, Role, Trace, TraceHeader


def dims(layers: int = 2, tokens: int = 64, row_block: int = 32, slots: int = 4, **changes: float) -> Dims:
    sizes = {"vocab": 1024, "hidden": 128, "ffn": 512, "head_dim": 32, "logit_rows": 4, "max_seqs": 4}
    sizes |= {"dtype": int(Dtype.BF16), "max_context": 256, "items": slots, "attention_slots": slots, "partials": 0}
    return handmade.small_dims(**sizes | {"layers": layers, "tokens": tokens, "row_block": row_block} | changes)


def record(
    name: str, operands: Sequence[int] = (), waits: Sequence[int] = (), signals: Sequence[int] = (), tp: int = 1
) -> Records:
    """One record of a Llama's phase for so many ranks; waits and signals are words."""
    phase = handmade.llama(dims(tp=tp)).by_name[name]
    return handmade.record(phase, *operands, waits=waits, signals=signals)


def program(
    d: Dims,
    prologue: Sequence[Sequence[Records]],
    body: Sequence[Sequence[Records]],
    epilogue: Sequence[Sequence[Records]],
    *,
    counters: int,
    ranks: int = 1,
) -> Program:
    """Streams are given per (rank, worker). Totals are left at zero: no view reads them."""
    zeros = np.zeros((ranks, counters), dtype=np.int32)
    segments = [handmade.segment(*streams) for streams in (prologue, body, epilogue)]
    return Program(d, handmade.llama(d), "host", ranks, len(body) // ranks, counters, *segments, *[zeros] * 3)


def llama(layers: int = 2, workers: int = 4, row_blocks: int = 2, tiles: int = 4) -> Program:
    """A whole step in miniature, of `tiles` tiles for each row block of a projection into the residual."""
    sizes = {"vocab": 256, "ffn": 256, "heads": 2, "kv_heads": 1, "items": 8 * row_blocks}
    d = dims(layers, tokens=32 * row_blocks, slots=2 * row_blocks, **sizes)
    return handmade.handmade(d, workers, tile=-(-d.hidden // tiles))


def _simulated(p: Program, target: machine.Machine, costs: Costs, stall: Stall | None = None) -> Trace:
    """The simulator's trace of a step that fills the program's rows, without instruction fetches."""
    target = replace(target, workers=p.workers)
    done = simulate(p, target, step_of(p), costs=costs, trace=True, stall=stall)
    assert done.trace is not None
    return replace(done.trace, intervals=done.trace.intervals[done.trace.intervals["kind"] != IntervalKind.FETCH])


SIGNAL_NS = 300


def run(p: Program, stall: tuple[int, int] | None = None) -> Trace:
    """A trace of CPU workers whose tiles take tens of microseconds. `stall` = (body record, layer) of an instruction
    that takes 5 ms longer.
    """
    host = machine.host(p.workers)
    rates = {"matmul_flops": ((1.0, 1e10),), "attention_flops": ((1.0, 1e9),), "vector_flops": 1e8}
    rates |= {"memory_bytes_per_s": 1e12, "cache_bytes_per_s": 1e12}
    costs = replace(costs_of(host), **rates, dispatch_s=200e-9, signal_s=SIGNAL_NS * 1e-9, launch_s=0.0)
    return _simulated(p, host, costs, Stall(1, *stall, 5e-3) if stall else None)


def stalled() -> tuple[Program, Trace, tuple[int, int]]:
    """A step of three layers in which the instruction (body record, layer) stalls."""
    p, where = llama(layers=3), (2, 1)
    return p, run(p, stall=where), where


def renumbered(p: Program, t: Trace) -> tuple[Program, Trace]:
    """The same with another phase in front, so that every phase has another number."""
    first = replace(p.forward.prologue[0], name="more", number=0)
    other = with_phases(p, [[first, *p.forward.prologue], list(p.forward.body), list(p.forward.epilogue)])
    return other, replace(t, header=replace(t.header, program=other.hash))


def trace(p: Program, rows: Sequence[tuple[int, ...]], *, dropped: int = 0, tick_s: float = 1e-9) -> Trace:
    """A trace of rows with DTYPE's fields in order, sorted as a trace must be."""
    intervals = np.array([tuple(r) for r in rows], dtype=DTYPE)
    intervals = intervals[np.lexsort((intervals["begin"], intervals["worker"], intervals["rank"]))]
    header = TraceHeader(p.hash, "simulator", tick_s, read_s=0.0, clock_error_s=0.0, dropped=dropped)
    return Trace(header, intervals)


def node(
    ranks: int = 8, workers: int = 132, layers: int = 2, slow: float = 1.0, clock_error_s: float = 0.0
) -> tuple[Program, Trace]:
    """Layers of a 70B-like model over a node's GPUs, simulated, with the roles of a GPU's worker.

    Matmuls take `slow` times as long. At full size the trace has more than 400 thousand intervals.
    """
    sizes = {"hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128, "vocab": 8192}
    limits = {"slots": 4 * workers, "items": 9 * workers, "max_context": 8192, "tp": ranks}
    p = handmade.handmade(dims(layers, 64 * workers, 128, **sizes, **limits), workers, tile=320)
    h100 = machine.load("h100")
    costs = costs_of(h100)
    costs = replace(costs, matmul_flops=tuple((rows, rate / slow) for rows, rate in costs.matmul_flops))
    trace = _simulated(p, h100, costs)
    trace.intervals["role"][trace.intervals["kind"] == IntervalKind.COUNTER_WAIT] = Role.INPUT_LOADER  # as on a GPU
    return p, replace(trace, header=replace(trace.header, clock_error_s=clock_error_s))
