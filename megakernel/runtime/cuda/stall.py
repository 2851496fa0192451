"""Explains why a launch made no progress, from what each warp was waiting for (recorded by csrc/cuda/watchdog.h).

In a stalled launch, nearly all warps wait, most of them only because another warp waits. This module finds the one wait
that blocks all others. It looks at the oldest unfinished instruction of each worker:

- If one of these instructions waits for something other than a counter, the fault is inside its worker.
- If all of them wait for counters, a signal to a counter is missing. The earliest of these instructions shows which
  one: all instructions before it have ended and sent their signals.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import trace as tracing
from ...isa import StepTable, record
from ...library import structure
from ...program import SEGMENTS, Program
from ...program.part import Signals
from ...targets.launch import AWAITED, BODY, COUNTER, EPILOGUE, PROLOGUE, SERVICE_WARPS, WARPS
from ..reference.launch import Blocked, Counters, ReferenceLaunch, StreamPlace

NOTE: np.dtype[Any] = np.dtype(structure("cuda/launch.h", "Diagnosis"))
_STORER = SERVICE_WARPS.index("storer")
_CONSUMERS = WARPS - len(SERVICE_WARPS)
_LATE = object()


@dataclass(frozen=True)
class Wait:
    """One warp, the instruction that it executed, and what it was waiting for."""

    rank: int
    worker: int
    warp: int
    segment: int
    layer: int
    number: int
    kind: str  # what the warp waits for, a key of AWAITED; "" if the recorded number is invalid
    index: int
    value: int
    expected: int

    @property
    def consumer(self) -> int:
        """The index of this warp among the consumer warps (which compute); negative if it is not one of them."""
        return self.warp - len(SERVICE_WARPS)


def waits_of(program: Program, notes: NDArray[Any], ranks: range) -> list[Wait]:
    """Return the waits that the watchdog has recorded on a GPU. `notes` is an array [blocks * WARPS] of NOTE, and
    `ranks` are the ranks on this GPU."""
    found = []
    for index in np.flatnonzero(notes["set"]):
        block, warp = divmod(int(index), WARPS)
        rank, worker = divmod(block, program.workers)
        n = {name: int(notes[index][name]) for name in NOTE.names or () if name not in ("set", "awaited")}
        kind = dict(enumerate(AWAITED)).get(int(notes[index]["awaited"]), "")
        found.append(Wait(ranks.start + rank, worker, warp, kind=kind, **n))
    return found


def explain(program: Program, table: StepTable, waits: Sequence[Wait]) -> str:
    """Return a clause that names the wait in `waits` (never empty) that blocks all others, and its probable cause."""
    if (damaged := next((wait for wait in waits if not _exists(program, wait)), None)) is not None:
        return f"{_describe(program, damaged)}; the program has no such instruction: a block's memory was overwritten"
    order = _Rehearsal(program, table).run()

    def age(wait: Wait) -> tuple[int, int, int]:
        return wait.segment, wait.layer, order.get((wait.segment, wait.number), -1)

    stuck = []
    for worker in sorted({(w.rank, w.worker) for w in waits}):
        own = [w for w in waits if (w.rank, w.worker) == worker]
        oldest = min((age(w) for w in own if w.segment >= 0), default=(-1, 0, 0))
        at_it = [w for w in own if age(w) == oldest]
        starved = [w for w in at_it if w.kind == COUNTER]
        stuck.append((bool(starved), oldest, starved[0] if starved else _inside(own, at_it), own))
    _, _, wait, own = min(stuck, key=lambda s: s[:2])
    said = _describe(program, wait)
    if wait.kind == COUNTER:
        return f"{said}: a signal of {' or '.join(_signallers(program, wait))} is missing"
    silent = sorted(set(range(_CONSUMERS)) - {w.consumer for w in own})
    if wait.warp == _STORER and silent:
        said += f", and consumer {', '.join(map(str, silent))} is still at work"
    return said


def _inside(waits: Sequence[Wait], oldest: Sequence[Wait]) -> Wait:
    """Return the wait that blocks a worker's other warps. `waits` are all its waits, `oldest` those in its oldest
    unfinished instruction.

    The first case that applies decides:

    - A consumer warp (which computes) waits for a page, and no loader is about to fill this page. A load is missing.
    - The storer warp waits, although all consumers have finished or some consumer is not waiting. An output is missing.
    - A loader waits. A consumer has not released a page.
    """
    consumers = [w for w in waits if w.consumer >= 0]
    unreleased = [w for w in waits if w.kind in ("empty", "free")]
    to_be_filled = {(w.index, 1 - w.expected) for w in unreleased}
    unfilled = [w for w in oldest if w.consumer >= 0 and w.kind in ("full", "filled")]
    unloaded = [w for w in unfilled if (w.index, w.expected) not in to_be_filled]
    storer = [w for w in oldest if w.warp == _STORER]
    behind = [w for w in oldest if w.consumer >= 0]
    silent = len(consumers) < _CONSUMERS
    unstored = storer if silent or not behind else []
    others = sorted(waits, key=lambda w: (w.kind == "fetched", w.kind != "inputs", w.warp))
    return [*unloaded, *unstored, *unreleased, *storer, *others][0]


class _Rehearsal(ReferenceLaunch):
    """Finds an order in which the instructions of a program can run, by executing one layer without computing anything.

    Some instructions are in queues, from which any worker may claim the next one. Here, a worker claims only when
    nothing else can run. So all instructions that a claimed instruction may have to wait for come before it.
    """

    def __init__(self, program: Program, table: StepTable) -> None:
        one = replace(program, dims=program.dims.changed(layers=1))
        counters = Counters(one)
        counters.launch = 1
        nothing: Any = lambda *_: None  # noqa: E731
        super().__init__(one, table, counters, nothing, nothing)
        self._order: dict[tuple[int, int], int] = {}
        self._arrived: Counter[tuple[int, int]] = Counter()
        self._ready: deque[Iterator[Any]] = deque()
        self._late: deque[Iterator[Any]] = deque()  # workers whose next action is to claim from a queue
        self._blocked: dict[tuple[int, int], list[Iterator[Any]]] = defaultdict(list)
        self._may_claim = False
        self._clock = count()

    def run(self, order: None = None) -> dict[tuple[int, int], int]:  # type: ignore[override]
        """Run all instructions that can run. Return the position of each (segment, record) in the order found."""
        ended = object()
        for rank in range(self._program.ranks):
            self._ready.extend(self._worker(rank, worker) for worker in range(self._program.workers))
        while self._ready or self._late:
            self._may_claim = not self._ready
            worker = (self._ready or self._late).popleft()
            state = next(worker, ended)
            if isinstance(state, Blocked):
                self._blocked[state.place.rank, state.counter].append(worker)
            elif state is not ended:
                (self._late if state is _LATE else self._ready).append(worker)
        return self._order

    def _run(self, place: StreamPlace) -> Iterator[Any]:
        yield from super()._run(place)
        self._order.setdefault(_key(place), next(self._clock))

    def _signal(self, place: StreamPlace, word: int, row: int = 0, arrivals: int = 1) -> None:
        super()._signal(place, word, row, arrivals)
        member = self._counter(place, word) + row // self._program.dims.bucket.row_block
        for rank in range(self._program.ranks):
            self._ready.extend(self._blocked.pop((rank, member), ()))

    def _timed(self, place: StreamPlace, work: Any) -> bool:
        self._order[_key(place)] = next(self._clock)
        return True

    def _drain(self, place: StreamPlace) -> Iterator[Any]:
        while self._left(place):
            if not self._may_claim:
                yield _LATE
                continue
            self._may_claim = False
            claimed = self._claim(place)
            if not self._left(place):
                # The queue is empty now. So the workers that were about to claim from it go on to their next
                # instruction, before any worker claims from another queue.
                self._ready.extend(self._late)
                self._late.clear()
            yield from self._run(claimed)

    def _attend(self, place: StreamPlace, layer: int, item: int) -> bool:
        self._timed(place, None)
        table = self._tables[place.rank]
        split = int(table.item_split[item])
        self._arrived[place.rank, split] += 1
        return split < 0 or self._arrived[place.rank, split] == table.item_splits[item]


def _key(place: StreamPlace) -> tuple[int, int]:
    return {tracing.PROLOGUE: PROLOGUE, tracing.EPILOGUE: EPILOGUE}.get(place.layer, BODY), place.row


def _signallers(program: Program, wait: Wait) -> list[str]:
    """Return the names of the phases whose instructions may signal the counter that `wait` waits for."""
    layers, block = program.dims.model.layers, _block(program, wait)
    records, segment, _ = program.every
    signals = Signals.of(program, records)
    # For each segment: whether a signal to its own block of counters, or to the next block, reaches the wait's block.
    reaches = np.array([(block == 0, False), (block < layers, block > 0), (block == layers, False)])
    hits = (signals.counter == wait.index) & (signals.rank == wait.rank)
    hits &= reaches[segment[signals.record], signals.ahead]
    numbers = np.unique(record.phase_number(records[signals.record[hits]])).tolist()
    return [program.forward.by_number[number].name for number in numbers]


def _block(program: Program, wait: Wait) -> int:
    """Return the number of the counter block (each layer has one) that contains the counter that `wait` waits for."""
    return (0, wait.layer, program.dims.model.layers)[wait.segment]


def _exists(program: Program, wait: Wait) -> bool:
    """Whether a recorded wait is possible: what it waits for is known, and its instruction exists in the program."""
    if wait.kind not in AWAITED or wait.segment >= len(SEGMENTS):
        return False
    if wait.segment < 0:
        return True
    layers = program.dims.model.layers if wait.segment == BODY else 1
    return wait.layer in range(layers) and wait.number in range(len(program.numbered(wait.segment)[0]))


def _describe(program: Program, w: Wait) -> str:
    role = SERVICE_WARPS[w.warp] if w.consumer < 0 else f"consumer {w.consumer}"
    where = "between instructions"
    if not _exists(program, w):
        where = f"in record {w.number} of segment {w.segment}"
    elif w.segment >= 0:
        name = program.forward.of_record(program.numbered(w.segment)[0][w.number]).name
        layer = f", layer {w.layer}" if w.segment == BODY else ""
        where = f"{'before' if w.warp == 0 else 'in'} {SEGMENTS[w.segment]} record {w.number} ({name}{layer})"
    what = AWAITED.get(w.kind, "no known barrier").format(w.index)
    if w.kind == COUNTER:
        block = f"in block {_block(program, w)} " if _exists(program, w) else ""
        state = f"{block}it has value {w.value}, expected {w.expected}"
    else:
        state = f"the barrier's phase of parity {w.expected} does not complete"
    return f"the {role} of rank {w.rank} worker {w.worker} waits {where} for {what}: {state}"
