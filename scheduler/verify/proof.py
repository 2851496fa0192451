"""Proof that a program is right for every valid step table, or what is wrong with it.

Reads the finished program, and shares no code with what made it: the program's phases say what its records do and
what a step means. Proved, over all ranks:

phases    every phase names buffers that its operation can work on, in an order that makes sense
form      every record decodes, stays in bounds and names counters of its block; attention slots appear once each;
          drains claim their queues whole; what an instruction holds at once fits the pages of shared memory
totals    every counter gets exactly its stored total of arrivals, in the first, the middle and the last block; one
          that gets none there is no obstacle and orders nothing
order     program order, counters and the ways to claim a queue have no cycle, with every edge that some step table
          may bring
coverage  what an instruction reads was written exactly once, on the copy that it reads, by the phase whose value it
          needs; every output is written
data      each read begins after the end of that write; each overwrite after the end of the earlier write and of its
          readers, with only the edges that every step table and every way to claim a queue bring: a record of a queue
          comes after what its own waits say, and what follows a drain knows of its records by counters only
epochs    with more than one rank, every stream ends after all work of all ranks

Overlap. A worker begins its instructions in order and ends them in order, but may begin any number of them before the
first ends. So between two accesses of the same data there is a counter, also on one worker: from the end of an
instruction one gets to the ends of those behind it in its stream and to the counters that they signal, from a counter
to the begins of those that wait for it, from a begin to the begins behind it. Overlap brings no deadlock: of all events
in an order that program order and counters allow, the first that has not ended has all that it waits for.

Queues. A queue's records are claimed in order, by whichever worker is at a drain that claims so far, or will be there
when it has ended what it has begun. No claim can block for ever: take the events in an order in which a record follows
the one before it in its queue and the begins of all drains that may claim it, and a drain's end follows all records
before its end. The first event of that order that has not happened can: if it is a record, all before it in the queue
are finished, and all before those drains in their streams, so the worker that has claimed it runs it, and if nobody
has, each worker at those drains is free to.

Three layers prove any number of layers. A run of the body waits on its own block only and signals its own block
and the next, so an edge never leads to an earlier layer (the prologue counts with layer 0, the epilogue with the
last block). A cycle therefore lies inside the prologue and layer 0, inside one later layer, or inside the
epilogue; all layers after the first have the same edges. A path between events of layers l and l + 1 stays in those
two layers, so for l >= 1 it exists for every l or for none. Every layer writes the same elements, so two accesses of
an element with no write between them are at most one layer apart; with neighbours ordered, all accesses of an element
are. The only exception is what the prologue writes and every layer reads: its reader in layer 0 must follow the
write, and each later one itself, one layer earlier. The partials of split attention are private to a
(row, KV head), so the order of items of successive layers, proved for ATTN, orders them too.

One launch proves any number of launches. Between two launches there is the host (one rank) or the exit barrier:
whatever a stream does in launch k + 1 comes after all that any rank does in launch k, but for joins that end a
stream, which only wait for what stays true. So when an instruction of launch k + 1 begins, every counter has got
exactly k times its total, every queue has been claimed exactly k times its length, the last piece of every split has
set its SPLITS word back to 0, and all that launch k read it has read: launch k + 1 finds what launch 1 found, and its
waits, which are for k + 1 times the total, are met by nothing less than all its own arrivals. A launch that is
aborted stops anywhere: the backend then ends all workers of all ranks and sets counters, claims and SPLITS back to
0, which is the state before launch 1; activations need no reset, because nothing reads what its launch did not write.
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
_MOST = 50  # violations that are spelled out


@dataclass(frozen=True)
class Report:
    """`checked` counts the instructions of a launch, all ranks and layers. No violations: proved."""

    checked: int
    seconds: float
    violations: list[str]

    @property
    def ok(self) -> bool:
        return not self.violations


def verify(program: Program) -> Report:
    """Prove `program` right for every valid step table, or list violations of the first stage that has any."""
    start = time.perf_counter()
    violations = next(filter(None, map(list, _stages(program))), [])
    if len(violations) > _MOST:
        violations[_MOST:] = ["and more"]
    return Report(program.instructions, time.perf_counter() - start, violations)


def _stages(program: Program) -> Iterator[Iterable[str]]:
    """The violations that each stage finds; each relies on what the ones before have proved."""
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
    """A counter with one instruction that signals it and one that waits for it."""
    rank, index = divmod(counter, program.counters)
    out = f"counter {index} (rank {rank}"
    signallers = [(e, event) for e in events for event, c, _, _ in e.signals for event in event[c == counter][:1]]
    waiters = [(e, event) for e in events for c, event in e.waits for event in event[c == counter][:1]]
    for what, pairs in (("signalled by", signallers), ("waited for by", waiters)):
        if pairs:
            out += f"; {what} {pairs[0][0].label(int(pairs[0][1]))}"
    return out + ")"
