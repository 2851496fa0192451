"""Proof that a program is right for every valid step table, or what is wrong with it.

Reads the finished program and the instruction table, and shares no code with what made the program. Proved:

form      every record decodes, stays in bounds and names counters of its block; attention slots appear once each
totals    every counter gets exactly its stored total of arrivals, in the first, the middle and the last block,
          and a counter that is waited for gets some
coverage  each phase writes each element of its outputs exactly once, so every output is written
order     program order and counter edges have no cycle, with every edge that some step table may bring
data      each read comes after the write whose value it needs; each overwrite after the earlier write and after
          that write's readers, with only the edges that every step table brings

Three layers prove any number of layers. A run of the body waits on its own block only and signals its own block
and the next, so an edge never leads to an earlier layer (the prologue counts with layer 0, the epilogue with the
last block). A cycle therefore lies inside the prologue and layer 0, inside one later layer, or inside the
epilogue; all layers after the first have the same edges. A path between events of layers l and l + 1 stays in those
two layers, so for l >= 1 it exists for every l or for none. Every buffer that the body writes, it writes whole in
each layer (coverage), so two accesses of an element with no write between them are at most one layer apart. The only
exception is what the prologue writes and every layer reads: the reader in layer l + 1 follows itself in layer l in
program order. So prologue, layers 0, 1, 2 and epilogue hold an instance of every pair that has to be ordered; with
neighbours ordered, all accesses of an element are. The partials of split attention are private to a (row, KV head),
so the order of items of successive layers, proved for ATTN, orders them too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..program import SEGMENTS, Program
from .verify_data import check_data, coverage
from .verify_form import Part, check_layout, check_records
from .verify_order import Events, Unrolled

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
    violations = list(islice(_violations(program), _MOST + 1))
    if len(violations) > _MOST:
        violations[_MOST:] = ["and more"]
    return Report(program.instructions, time.perf_counter() - start, violations)


def _violations(program: Program) -> Iterator[str]:
    found = list(check_layout(program))
    if found:
        yield from found
        return
    parts = [Part(program, name) for name in SEGMENTS]
    found = list(check_records(program, parts))
    if found:
        yield from found
        return
    events = [Events(part) for part in parts]
    found = list(_totals(program, events))
    unrolled = Unrolled(program, events, min(program.dims.layers, _LAYERS))
    order, cycle = unrolled.order()
    if cycle:
        found.append("deadlock, each waiting for the next: " + "; ".join(unrolled.label(row) for row in cycle))
    uncovered, phases, cuts, maps = coverage(events)
    found += uncovered
    yield from found
    if not found:
        yield from check_data(unrolled, unrolled.clocks(order), phases, cuts, maps)


def _totals(program: Program, events: list[Events]) -> Iterator[str]:
    prologue, body, epilogue = events
    waits = [np.unique(np.concatenate([c for c, _ in e.waits + e.may_wait])) for e in events]
    own, across = body.arrivals(False), body.arrivals(True)
    blocks = [
        ("first", program.totals_first, prologue.arrivals(False) + own, np.union1d(waits[0], waits[1])),
        ("middle", program.totals_middle, own + across, waits[1]),
        ("last", program.totals_last, across + epilogue.arrivals(False), waits[2]),
    ]
    if program.dims.layers == 1:
        del blocks[1]
    for name, totals, arrivals, waited in blocks:
        stored = totals.astype(np.int64).reshape(-1)
        for counter in np.nonzero(stored != arrivals)[0]:
            label = _counter(program, int(counter), events)
            yield f"{name} block: {label} has total {stored[counter]} but gets {arrivals[counter]} arrivals"
        for counter in waited[arrivals[waited] == 0]:
            yield f"{name} block: {_counter(program, int(counter), events)} is waited for and never signalled"


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
