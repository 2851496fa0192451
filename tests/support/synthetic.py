"""Traces whose answers are known: by hand where a test says what happened, in virtual time otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import handmade
import numpy as np
import program_parts
from mutate import with_phases
from simulated import ordered, step_of

from megakernel.isa import Dims, Dtype, Operation
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.program import Program, Segment
from megakernel.trace import DTYPE, EPILOGUE, PROLOGUE, IntervalKind, Role, Trace, TraceHeader


def dims(layers: int = 2, tokens: int = 64, row_block: int = 32, slots: int = 4, **changes: float) -> Dims:
    sizes = {"vocab": 1024, "hidden": 128, "ffn": 512, "head_dim": 32, "logit_rows": 4, "max_seqs": 4}
    sizes |= {"dtype": int(Dtype.BF16), "max_context": 256, "items": slots, "attention_slots": slots, "partials": 0}
    return handmade.small_dims(**sizes | {"layers": layers, "tokens": tokens, "row_block": row_block} | changes)


def record(
    name: str, operands: Sequence[int] = (), waits: Sequence[int] = (), signals: Sequence[int] = (), tp: int = 1
) -> Records:
    """One record of a Llama's phase for so many ranks; waits and signals are words."""
    phase = handmade.llama(dims(tp=tp)).by_name[name]
    return program_parts.record(phase, *operands, waits=waits, signals=signals)


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
    segments = [program_parts.segment(*streams) for streams in (prologue, body, epilogue)]
    return Program(d, handmade.llama(d), "host", ranks, len(body) // ranks, counters, *segments, *[zeros] * 3)


def llama(layers: int = 2, workers: int = 4, row_blocks: int = 2, tiles: int = 4) -> Program:
    """A whole step in miniature, of `tiles` tiles for each row block of a projection into the residual."""
    sizes = {"vocab": 256, "ffn": 256, "heads": 2, "kv_heads": 1, "items": 8 * row_blocks}
    d = dims(layers, tokens=32 * row_blocks, slots=2 * row_blocks, **sizes)
    return handmade.handmade(d, workers, tile=-(-d.hidden // tiles))


MICROSECONDS = {
    Operation.GATHER: 3,
    Operation.ROPE: 3,
    Operation.NORM: 8,
    Operation.MATMUL: 26,
    Operation.ATTENTION: 45,
    Operation.SAMPLE: 8,
    Operation.JOIN: 1,
}
SIGNAL_NS, DISPATCH_NS = 300, 200


def run(p: Program, seed: int = 0, stall: tuple[int, int] | None = None) -> Trace:
    """Execute `p` in virtual time: nanosecond ticks, a prefetch LOAD in front of each matmul. A record waits for all
    that its attention items wait for.

    `stall` = (body record, layer) of an instruction that takes 5 ms longer. Durations do not depend on it.
    """
    rng = np.random.default_rng(seed)
    left = p.totals().reshape(-1).astype(np.int64)
    arrived = np.zeros(len(left), np.int64)  # the last arrival so far
    streams: list[list[tuple[tuple[int, int], set[int], list[tuple[int, int]]]]] = [[] for _ in range(p.workers)]
    for (key, stream), tasks in groupby(ordered(p, step_of(p)), key=lambda task: (task.key, task.stream)):
        every = list(tasks)
        waits, adds = {c for task in every for c in task.waits}, [add for task in every for add in task.adds]
        streams[stream].append((key, waits, adds))
    clock, heads, rows = [0] * p.workers, [0] * p.workers, []
    while any(h < len(s) for h, s in zip(heads, streams, strict=True)):
        for w, stream in enumerate(streams):
            if heads[w] == len(stream) or any(left[c] for c in stream[heads[w]][1]):
                continue
            (layer, number), waits, adds = stream[heads[w]]
            heads[w] += 1
            segment = 0 if layer == PROLOGUE else 2 if layer == EPILOGUE else 1
            phase = p.forward.by_number[int(p.numbered(segment)[0][number, 0])]
            ready = max((int(arrived[c]) for c in waits), default=0) + SIGNAL_NS
            start = max(clock[w] + DISPATCH_NS, ready if waits else 0)
            common = (number, 1, w, layer, 0, Role.WORKER)
            if ready > clock[w] and waits:
                rows.append((clock[w], start, *common, IntervalKind.COUNTER_WAIT, 0))
            if phase.is_matmul:
                rows.append((clock[w], min(clock[w] + 2500, start), *common, IntervalKind.LOAD, 0))
            end = start + int(MICROSECONDS[phase.operation] * 1000 * rng.uniform(0.75, 1.35))
            end += 5_000_000 if stall == (number, layer) else 0
            rows.append((start, end, *common, IntervalKind.COMPUTE, 0))
            clock[w] = end
            for counter, count in adds:
                left[counter] -= count
                arrived[counter] = max(arrived[counter], end)
    return trace(p, rows)


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


# Phases of a layer in `node`: instruction, instructions per worker, mean microseconds, whether it signals every rank.
PHASES = (
    ("attn_norm", 1, 6, True),
    ("qkv_rope", 3, 92, False),
    ("attention", 4, 64, False),
    ("o_partial", 16, 12, True),
    ("o_reduce", 2, 5, False),
    ("mlp_norm", 1, 6, True),
    ("gate_up_silu", 7, 180, False),
    ("down_partial", 16, 41, True),
    ("down_reduce", 2, 5, True),
)
_GROUPS = 4  # counters of a phase: its instructions in order, in so many parts
_SIGNAL, _LOAD, _STORE = 400, 3000, 700  # nanoseconds


def node(
    ranks: int = 8, workers: int = 132, layers: int = 2, slow: float = 1.0, seed: int = 0, clock_error_s: float = 0.0
) -> tuple[Program, Trace]:
    """Layers of a 70B-like model over a node's GPUs, in virtual time, with the roles of a GPU's worker.

    Matmuls take `slow` times as long. At full size the trace has more than 400 thousand intervals.
    """
    d = dims(layers, 8192, 128, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256, tp=ranks)
    rng = np.random.default_rng(seed)
    forward = handmade.llama(d)
    count = sum(n for _, n, _, _ in PHASES)
    body = np.zeros((ranks, workers, count, rec.WORDS), dtype=np.int32)
    lane = np.arange(ranks * workers).reshape(ranks, workers)
    clock = np.zeros((ranks, workers), dtype=np.int64)
    done = np.zeros((len(PHASES), _GROUPS, ranks), dtype=np.int64)  # last arrival at each counter
    loaded, stored = clock.copy(), clock.copy()
    parts: list[tuple[object, ...]] = []
    for layer in range(layers):
        place = 0
        for phase, (name, n, mean, everywhere) in enumerate(PHASES):
            before = (phase - 1) % len(PHASES)
            ahead = phase == len(PHASES) - 1
            done[phase] = 0
            kind = forward.by_name[name]
            matmul = kind.is_matmul
            for k in range(n):
                wanted = ((k + 1) * _GROUPS - 1) // n
                groups = range(k * _GROUPS // n, wanted + 1)
                here = body[:, :, place]
                here[..., 0] = kind.number
                tile = (lane % 64 * 128, 128, (lane // 64 * n + k) % 16 * 256, 256)
                if kind.operation is Operation.ATTENTION:
                    tile = (lane % workers * n + k, 1, 1, 0)
                for word, value in enumerate(tile[: len(kind.operands)]):
                    here[..., rec.OPERAND_WORD + word] = value
                here[..., rec.WAIT_WORD] = rec.counter_word(before * _GROUPS + wanted)
                for rank in range(ranks):
                    to = rec.ALL_RANKS if everywhere else rank
                    for nth, g in enumerate(groups):
                        signal = rec.counter_word(phase * _GROUPS + g, rank=to, next_layer=ahead)
                        here[rank, :, rec.SIGNAL_WORD + nth] = signal
                first = layer == 0 and phase == 0
                arrived = 0 if first else done[before, wanted][:, None] + _SIGNAL
                begin = np.maximum(clock + 200, arrived)
                last = loaded + rng.integers(0, 2000, clock.shape)
                last_load = np.maximum(last, begin - 12_000) + _LOAD
                begin = np.maximum(begin, last_load if matmul else begin)
                duration = (mean * 1000 * rng.uniform(0.85, 1.15, clock.shape)).astype(np.int64)
                if matmul:
                    duration = (duration * slow).astype(np.int64)
                end = begin + duration
                kept = np.maximum(end, stored) + _STORE
                common = (place, layer)
                if matmul:
                    parts.append((Role.LOADER, IntervalKind.PAGE_WAIT, *common, loaded, last_load - _LOAD))
                    parts.append((Role.LOADER, IntervalKind.LOAD, *common, last_load - _LOAD, last_load))
                if not first:
                    met = np.maximum(arrived, clock - 3000)
                    parts.append((Role.INPUT_LOADER, IntervalKind.COUNTER_WAIT, *common, np.minimum(clock, met), met))
                parts.append((Role.CONSUMER, IntervalKind.COMPUTE, *common, begin, end))
                parts.append((Role.STORER, IntervalKind.STORE, *common, kept - _STORE, kept))
                clock, stored = end, kept
                loaded = np.where(matmul, last_load, loaded)
                latest = kept.max(axis=1)
                for g in groups:
                    done[phase, g] = np.maximum(done[phase, g], latest.max() if everywhere else latest)
                place += 1
    return _node_trace(d, body, parts, ranks, workers, clock_error_s)


def _node_trace(
    d: Dims, body: np.ndarray, parts: list[tuple[object, ...]], ranks: int, workers: int, clock_error_s: float
) -> tuple[Program, Trace]:
    lanes, count = ranks * workers, body.shape[2]
    empty = Segment(np.zeros((0, rec.WORDS), np.int32), np.zeros(lanes + 1, np.int32))
    offsets = (np.arange(lanes + 1) * count).astype(np.int32)
    zeros = np.zeros((ranks, len(PHASES) * _GROUPS), dtype=np.int32)
    segments = empty, Segment(body.reshape(-1, rec.WORDS), offsets), empty
    p = Program(d, handmade.llama(d), "h100", ranks, workers, zeros.shape[1], *segments, *[zeros] * 3)
    intervals = np.zeros((len(parts), lanes), dtype=DTYPE)
    for row, (role, kind, place, layer, begin, end) in zip(intervals, parts, strict=True):
        row["role"], row["kind"], row["layer"], row["launch"] = role, kind, layer, 1
        row["begin"], row["end"] = np.ravel(begin), np.ravel(end)
        row["rank"], row["worker"] = np.divmod(np.arange(lanes), workers)
        row["instruction"] = offsets[:-1] + place
    flat = intervals.ravel()
    flat = flat[flat["end"] >= flat["begin"]]
    flat = flat[np.lexsort((flat["begin"], flat["worker"], flat["rank"]))]
    header = TraceHeader(p.hash, "simulator", 1e-9, read_s=0.0, clock_error_s=clock_error_s, dropped=0)
    return p, Trace(header, flat)
