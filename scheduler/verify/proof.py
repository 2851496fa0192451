"""Proves that a program is right for every valid step table, or lists what is wrong with it.

The verifier reads the finished program and shares no code with the scheduler. A program has a stream of records
(encoded instructions) for each worker. Records wait for counters and signal counters when they end. The program's
phases (operations) define what its records do and what a step means. The step table has the inputs of one step. The
verifier proves the following, over all ranks:

phases    Every phase names buffers that its operation can use, in a meaningful order.
form      Every record decodes, stays in bounds and names counters of its block (each layer has a block of counters,
          and the epilogue has the last block). Each attention slot, a list of attention work in the step table, appears
          once. The drains of a queue, which are the instructions that claim and run its records, claim all of them. The
          pages that an instruction holds at once fit in shared memory.
totals    Every counter gets exactly its stored total of arrivals, in the first, the middle and the last block. If a
          counter gets no arrivals in a block, waits for it there end at once and order nothing.
order     The graph of program order, counters and claims of queues has no cycle, even with all edges that any step
          table may add.
coverage  Every element that an instruction reads was written exactly once, in the rank's copy that is read, by the
          phase whose value the instruction needs. Every output is written.
data      Each read begins after the end of the write that it needs. Each overwrite begins after the end of the previous
          write and of all reads of that write's value. Only edges count that exist for every step table and every way
          to claim a queue. So a record of a queue is ordered only after its own waits. An instruction after a drain
          is ordered after the queue's records only if it waits for their counters.
epochs    With several ranks, every stream ends after all work of all ranks, so launches never overlap.

Overlap. A worker begins its instructions in order and ends them in order, but may begin any number of them before the
first one ends. So two accesses of the same data need a counter between them even on one worker. The graph has these
edges. From the end of an instruction, edges lead to the ends of later instructions of its stream and to the counters
that the instruction signals. From a counter, they lead to the begins of the instructions that wait for the counter.
From a begin, they lead to later begins of the stream. Overlap cannot cause a deadlock. To see this, take all begins and
ends in an order that program order and counters allow. The first of them that has not happened has everything that it
waits for, so it can happen.

Queues. The records of a queue are claimed in order, by any worker whose drain covers them, once that worker has started
everything before the drain. No claim can block forever. To see this, take all events in an order with two properties. A
record follows the previous record of its queue and the begins of all drains that may claim the record. A worker leaves
a drain after all records that the drain covers. The first event in this order that has not happened can happen. If it
is a record, then all earlier records of the queue are finished, and every drain that may claim the record has been
reached. If a worker has claimed the record, that worker runs it; otherwise any worker at one of these drains is free to
claim it.

Experts. A table that the step itself writes says which experts have which rows. An instruction's declared regions have
a place for every expert, so the proof holds for every table (megakernel/isa/operations/experts.py).

Three layers prove any number of layers. The body, the instructions of one layer, runs once per layer. Each run waits
only for counters of its own block and signals only its own block and the next one. So an edge never leads to an earlier
layer. (The prologue counts with layer 0, the epilogue with the last block.) A cycle therefore lies inside the prologue
and layer 0, inside one later layer, or inside the epilogue. All layers after the first have the same edges. A path
between events of layers l and l + 1 stays in these two layers. So for l >= 1, such a path exists for every l or for
none. Every layer writes the same elements, so two accesses of an element without a write between them are at most one
layer apart. So if neighbouring layers are ordered, all accesses of an element are ordered. The only exception is data
that the prologue writes and every layer reads: its reader in layer 0 must follow the write, and each later reader must
follow the same reader one layer earlier. The partial results of split attention belong to one (row, KV head). So the
order of items in successive layers, proved for ATTN, also orders the partial results.

One launch proves any number of launches. The host (with one rank) or the exit barrier (with several ranks) separates
launches. Everything that a stream does in launch k + 1 comes after everything that any rank does in launch k. The only
exceptions are joins at the end of a stream, which only wait for conditions that stay true. So when an instruction of
launch k + 1 begins, every counter has exactly k times its total, and every queue has been claimed exactly k times its
length. The last item of every split has reset its count, SPLITS, to 0, and all reads of launch k are done. Launch k + 1
finds the same state as launch 1, and its waits, for k + 1 times the total, need all of its own arrivals. An aborted
launch may stop anywhere. The backend then ends all workers of all ranks and resets counters, claims and SPLITS to 0,
the state before launch 1. Activations need no reset, because nothing reads what its launch did not write."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megakernel.program import Program
from megakernel.program.checks import Checks
from megakernel.scheduler.verify.data import check_data
from megakernel.scheduler.verify.order import Events, Unrolled
from megakernel.targets.hopper import violations

_LAYERS = 3
_MOST = 50  # the maximum number of violations that a report lists


@dataclass(frozen=True)
class Report:
    """The result of a proof. `checked` is the number of instructions of a launch, over all ranks and layers. The
    program is proved safe if there are no violations. `more` says whether there are others, not listed."""

    checked: int
    seconds: float
    violations: list[str]
    more: bool = False

    @property
    def ok(self) -> bool:
        return not self.violations


def verify(program: Program) -> Report:
    """Prove that `program` computes what its phases define, without races or deadlocks, for every valid step table (the
    inputs of a step). Stages run in turn until one finds violations. The report lists that stage's violations."""
    start = time.perf_counter()
    violations = next(filter(None, map(list, _stages(program))), [])
    more = len(violations) > _MOST
    return Report(program.instructions, time.perf_counter() - start, violations[:_MOST], more)


def _stages(program: Program) -> Iterator[Iterable[str]]:
    """Yield the violations that each stage finds. Each stage relies on what the earlier stages have proved."""
    checks = Checks(program)
    yield from checks.stages(violations)
    events = [Events(part) for part in checks.parts]
    found = list(_totals(program, events))
    unrolled = Unrolled(program, events, min(program.dims.model.layers, _LAYERS))
    order, cycle = unrolled.order()
    if cycle:
        found.append("deadlock, each waiting for the next: " + "; ".join(unrolled.label(row) for row in cycle))
    yield found
    yield check_data(unrolled, checks.uses, order, _MOST + 1)


def _totals(program: Program, events: list[Events]) -> Iterator[str]:
    prologue, body, epilogue = events
    own, across = body.arrivals(False), body.arrivals(True)
    blocks = [
        ("first", program.totals_first, prologue.arrivals(False) + own),
        ("middle", program.totals_middle, own + across),
        ("last", program.totals_last, across + epilogue.arrivals(False)),
    ]
    if program.dims.model.layers == 1:
        del blocks[1]
    for name, totals, arrivals in blocks:
        stored = totals.astype(np.int64).reshape(-1)
        for counter in np.nonzero(stored != arrivals)[0]:
            rank, index = divmod(int(counter), program.counters)
            found = f"has total {stored[counter]} but gets {arrivals[counter]} arrivals"
            yield f"{name} block: counter {index} (rank {rank}) {found}"
