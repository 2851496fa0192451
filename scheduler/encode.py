"""Encodes tasks, their workers and their counters into a program, which has a 128-byte record per instruction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import DRAIN, JOIN, Operation
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.program import SEGMENTS, Program, Segment
from megakernel.program.program import TOTALS
from megakernel.scheduler.derive import BODY, EPILOGUE
from megakernel.scheduler.place import Placed
from megakernel.scheduler.sync import Join, Sync, Words
from megakernel.scheduler.tasks import PhaseTasks, Tasks


def encode(tasks: Tasks, sync: Sync, placed: list[list[Placed]], claimed: str) -> Program:
    """Build the program of `tasks`. `sync` has the counters that tasks wait for and signal. `placed` has the worker and
    the position of each task. `claimed` says which instructions workers claim from queues at run time (see Options)."""
    ranks, workers = tasks.dims.split.tp, tasks.machine.workers
    segments, queues = [], Segment(np.zeros((0, rec.WORDS), np.int32), np.zeros(1, np.int32))
    for number, (parts, where) in enumerate(zip(tasks.segments, placed, strict=True)):
        joins = [join for join in sync.joins if join.segment == number]
        records = _encode(parts, where, sync.waits[number], sync.signals[number], joins, workers)
        if number == BODY and claimed:
            attention = tasks.forward.numbers(Operation.ATTENTION) if claimed == "attention" else None
            records, queues = _with_queue(records, ranks, workers, attention)
        segments.append(_streams(records, ranks * workers))
    if sync.barrier:
        segments[EPILOGUE] = _with_barrier(segments[EPILOGUE], sync.barrier, workers)
    fields: dict[str, Any] = dict(zip(SEGMENTS, segments, strict=True)) | {name: getattr(sync, name) for name in TOTALS}
    machine, counters = tasks.machine.name, sync.totals_first.shape[-1]
    return Program(tasks.dims, tasks.forward, machine, ranks, workers, counters, **fields, queues=queues)


def _records(tasks: PhaseTasks, waits: Words, signals: Words) -> Records:
    out = np.zeros((len(tasks), rec.WORDS), dtype=np.int32)
    out[:, 0] = tasks.phase.number
    for i, name in enumerate(tasks.phase.operands):
        out[:, rec.OPERAND_WORD + i] = tasks.columns[name]
    rec.waits(out)[:] = waits
    rec.signals(out)[:] = signals
    return out


def _join(waits: Words, signals: Words) -> Records:
    """Return the encoding of one `join`, an instruction that only waits for counters and signals others: [1, WORDS]."""
    return rec.encode(JOIN.number, (), waits, signals)[None]


@dataclass(frozen=True)
class _Placed:
    """The encoded instructions (records) of the prologue, of a layer or of the epilogue. Each record belongs to the
    stream of one worker, and `order` is its position in one topological order of all records."""

    records: Records
    stream: NDArray[np.int64]  # rank * workers + worker
    order: NDArray[np.float64]


def _encode(
    parts: list[PhaseTasks],
    placed: list[Placed],
    waits: list[Words],
    signals: list[Words],
    joins: list[Join],
    workers: int,
) -> _Placed:
    """Encode the instructions of the prologue, a layer or the epilogue. If tasks wait for more counters than a record
    can name, a `join` instruction waits for these counters instead. The join runs just before the first of these tasks,
    in the same stream."""
    records = [_records(*columns) for columns in zip(parts, waits, signals, strict=True)]
    records += [_join(join.waits, join.signal) for join in joins]
    order: list[NDArray[np.float64]] = [p.order.astype(np.float64) for p in placed]
    stream = [tasks.rank * workers + p.worker for tasks, p in zip(parts, placed, strict=True)]
    for join in joins:
        first = join.members[np.argmin(placed[join.tasks].order[join.members])]
        order.append(np.array([placed[join.tasks].order[first] - 0.5]))
        stream.append(stream[join.tasks][[first]])
    return _Placed(np.concatenate(records), np.concatenate(stream), np.concatenate(order))


def _streams(placed: _Placed, count: int) -> Segment:
    """Return the records sorted by stream, and in each stream by position. `count` is the number of streams."""
    sorting = np.lexsort((placed.order, placed.stream))
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(placed.stream, minlength=count), out=offsets[1:])
    return Segment(placed.records[sorting], offsets)


def _with_queue(body: _Placed, ranks: int, workers: int, phases: list[int] | None) -> tuple[_Placed, Segment]:
    """Move the instructions of `phases` (None: of all phases) from the workers' streams into one queue per rank, from
    which any worker of the rank may claim them. Return the streams and the queues.

    Each stream gets a `drain` instruction at the position that the queue's first record had in the program's order. A
    worker that reaches the drain claims and runs the queue's instructions until none is left. One drain may claim all
    attention instructions, because the streams follow one topological order: everything that attention waits for comes
    before the first attention instruction, and everything that waits for attention comes after the last one."""
    rank = body.stream // workers
    claimed = np.ones(len(rank), bool) if phases is None else np.isin(rec.phase_number(body.records), phases)
    queues = _streams(_Placed(body.records[claimed], rank[claimed], body.order[claimed]), ranks)
    lengths = np.repeat(np.diff(queues.offsets), workers)
    drains = np.zeros((ranks * workers, rec.WORDS), dtype=np.int32)
    drains[:, 0] = DRAIN.number
    drains[:, rec.OPERAND_WORD + DRAIN.operands.index("end")] = lengths
    begin = np.full(ranks, np.inf)
    np.minimum.at(begin, rank[claimed], body.order[claimed])
    used, left = lengths > 0, ~claimed
    rest = _Placed(
        np.concatenate([body.records[left], drains[used]]),
        np.concatenate([body.stream[left], np.flatnonzero(used)]),
        np.concatenate([body.order[left], np.repeat(begin, workers)[used]]),
    )
    return rest, queues


def _with_barrier(epilogue: Segment, counters: tuple[int, int], workers: int) -> Segment:
    """Return the epilogue with a barrier: at its end, every stream waits until every instruction of every rank has
    ended. All workers of a rank signal a first counter. One worker of the rank waits for that counter and then signals
    a second counter on all ranks. Every worker waits for the second counter."""
    gather, leave = counters
    none = np.zeros(0, np.int32)

    def word(counter: int, rank: int = 0) -> Words:
        return np.array([rec.counter_word(counter, rank=rank)], np.int32)

    stream = np.arange(len(epilogue.offsets) - 1)
    leads = stream % workers == 0
    arrive = np.concatenate([_join(none, word(gather, rank)) for rank in range(len(stream) // workers)])
    ends = np.repeat(arrive[stream // workers], 2 + leads, axis=0)
    last = np.cumsum(2 + leads) - 1  # of each stream
    ends[last[leads] - 1] = _join(word(gather), word(leave, rec.ALL_RANKS))
    ends[last] = _join(word(leave), none)
    records = np.insert(epilogue.records, np.repeat(epilogue.offsets[1:], 2 + leads), ends, axis=0)
    added = np.append(0, last + 1)
    return Segment(records, (epilogue.offsets + added).astype(np.int32))
