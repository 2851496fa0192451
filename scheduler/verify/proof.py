"""Proves that a program is right for every valid step table, or lists what is wrong with it.

The verifier reads the finished program and shares no code with the scheduler. The program's phases define what its
records do and what a step means. It proves the following, over all ranks:

phases    Every phase names buffers that its operation can use, in a meaningful order.
form      Every record decodes, stays in bounds and names counters of its block. Each attention slot appears once.
          Drains claim their queues completely. What an instruction holds at once fits the pages of shared memory.
totals    Every counter gets exactly its stored total of arrivals, in the first, the middle and the last block. A
          counter without arrivals in a block neither blocks nor orders anything there.
order     The graph of program order, counters and claims of queues has no cycle, even with all edges that any step
          table may add.
coverage  Every element that an instruction reads was written exactly once, on the copy that it reads, by the phase
          whose value it needs. Every output is written.
data      Each read begins after the end of the write that it needs. Each overwrite begins after the end of the previous
          write and of all reads of its value. Only edges that exist for every step table and every way to claim a queue
          count: a record of a queue comes after its own waits, and instructions after a drain are ordered after the
          queue's records only through counters.
epochs    With several ranks, every stream ends after all work of all ranks.

Overlap. A worker begins its instructions in order and ends them in order, but may begin any number of them before the
first one ends. So two accesses of the same data need a counter between them even on one worker. Order leads from the
end of an instruction to the ends of later instructions of its stream and to the counters they signal; from a counter to
the begins of the instructions that wait for it; from a begin to later begins of its stream. Overlap cannot cause a
deadlock: take all events in an order that program order and counters allow. The first event that has not ended has
everything that it waits for, so it can end.

Queues. The records of a queue are claimed in order, by any worker whose drain covers them, once that worker has started
everything before the drain. No claim can block forever. Take the events in an order in which a record follows the
previous record of its queue and the begins of all drains that may claim it, and in which a worker leaves a drain after
all records that the drain covers. The first event of that order that has not happened can happen: if it is a record,
then all earlier records of the queue are finished, and so is everything that precedes, in their streams, the drains
that may claim it. If a worker has claimed the record, it runs the record; otherwise each worker at one of these drains
is free to claim it.

Three layers prove any number of layers. A run of the body waits only on its own block and signals only its own block
and the next one, so an edge never leads to an earlier layer (the prologue counts with layer 0, the epilogue with the
last block). A cycle therefore lies inside the prologue and layer 0, inside one later layer, or inside the epilogue, and
all layers after the first have the same edges. A path between events of layers l and l + 1 stays in these two layers,
so for l >= 1 it exists for every l or for none. Every layer writes the same elements, so two accesses of an element
without a write between them are at most one layer apart. So if neighbouring layers are ordered, all accesses of an
element are ordered. The only exception is data that the prologue writes and every layer reads: its reader in layer 0
must follow the write, and each later reader must follow the same reader one layer earlier. The partial results of split
attention belong to one (row, KV head), so the order of items in successive layers, proved for ATTN, orders them too.

One launch proves any number of launches. Between two launches stands the host (one rank) or the exit barrier (several).
Everything that a stream does in launch k + 1 comes after everything that any rank does in launch k, except joins at the
end of a stream, which only wait for conditions that stay true. So when an instruction of launch k + 1 begins, every
counter has exactly k times its total, every queue has been claimed exactly k times its length, the last item of every
split has reset its SPLITS word to 0, and all reads of launch k are done. Launch k + 1 finds the same state as launch 1,
and its waits, for k + 1 times the total, need all of its own arrivals. An aborted launch may stop anywhere. The backend
then ends all workers of all ranks and resets counters, claims and SPLITS to 0, the state before launch 1. Activations
need no reset, because nothing reads what its launch did not write.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...program import SEGMENTS, Program
from ...program.boxes import check_boxes, uses
from ...program.form import Part, check_layout, check_records
from ...program.phases import check_phases
from .data import check_data
from .order import Events, Unrolled

_LAYERS = 3
_MOST = 50  # the maximum number of violations that a report lists


@dataclass(frozen=True)
class Report:
    """The result of a proof. `checked` counts the instructions of a launch over all ranks and layers. Without
    violations, the program is proved.
    """

    checked: int
    seconds: float
    violations: list[str]

    @property
    def ok(self) -> bool:
        return not self.violations


def verify(program: Program) -> Report:
    """Prove `program` right for every valid step table, or list the violations of the first stage that finds any."""
    start = time.perf_counter()
    violations = next(filter(None, map(list, _stages(program))), [])
    if len(violations) > _MOST:
        violations[_MOST:] = ["and more"]
    return Report(program.instructions, time.perf_counter() - start, violations)


def _stages(program: Program) -> Iterator[Iterable[str]]:
    """The violations that each stage finds. Each stage relies on what the earlier ones have proved."""
    yield check_layout(program)
    yield check_phases(program.forward, program.dims)
    parts = [Part(program, name) for name in SEGMENTS]
    yield check_records(program, parts)
    touched = uses(parts)
    yield check_boxes(touched)
    events = [Events(part) for part in parts]
    found = list(_totals(program, events))
    unrolled = Unrolled(program, events, min(program.dims.layers, _LAYERS))
    order, cycle = unrolled.order()
    if cycle:
        found.append("deadlock, each waiting for the next: " + "; ".join(unrolled.label(row) for row in cycle))
    yield found
    yield check_data(unrolled, touched, order, _MOST + 1)


def _totals(program: Program, events: list[Events]) -> Iterator[str]:
    prologue, body, epilogue = events
    own, across = body.arrivals(False), body.arrivals(True)
    blocks = [
        ("first", program.totals_first, prologue.arrivals(False) + own),
        ("middle", program.totals_middle, own + across),
        ("last", program.totals_last, across + epilogue.arrivals(False)),
    ]
    if program.dims.layers == 1:
        del blocks[1]
    for name, totals, arrivals in blocks:
        stored = totals.astype(np.int64).reshape(-1)
        for counter in np.nonzero(stored != arrivals)[0]:
            label = _counter(program, int(counter), events)
            yield f"{name} block: {label} has total {stored[counter]} but gets {arrivals[counter]} arrivals"


def _counter(program: Program, counter: int, events: list[Events]) -> str:
    """Describe a counter, with one instruction that signals it and one that waits for it."""
    rank, index = divmod(counter, program.counters)
    out = f"counter {index} (rank {rank}"
    signallers = [(e, event) for e in events for event, c, _, _ in e.signals for event in event[c == counter][:1]]
    waiters = [(e, event) for e in events for c, event in e.waits for event in event[c == counter][:1]]
    for what, pairs in (("signalled by", signallers), ("waited for by", waiters)):
        if pairs:
            out += f"; {what} {pairs[0][0].label(int(pairs[0][1]))}"
    return out + ")"
