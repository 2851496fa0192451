"""What a program really does: every interleaving of a small one, adversarial ones of a larger.

The judge of the verifier, sharing no code with it or with the scheduler: it knows the records, the counters' rule
and the program's phases. A program becomes streams of atomic steps (an instruction, or one attention item), each with
the counters it waits for, the counters it adds to and the boxes it touches. What counters allow depends on how far
each stream is and on nothing else, so every reachable state can be visited. If no reachable state lets two steps run
whose boxes conflict, all interleavings give the same data, and one of them tells whether it is the right data. Two
launches run back to back, a rank starting its second when its own streams have ended the first.

A stream may begin steps before the one it is at has ended, in order, as soon as their counters have their totals, and
claim from a queue whose drain is the next step. What it has begun adds to no counter, so the states are the same; but
steps of one stream may conflict too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from atomic_steps import LAUNCHES, Box, Data, Model, Right, Step, Table, Wild, expected, in_order, make_table

from megakernel.program import Program


@dataclass(frozen=True)
class State:
    """How far everything is: per stream (launch and position), per stream the queue record it has claimed and how
    far, per queue the records claimed."""

    at: tuple[int, ...]
    inner: tuple[tuple[int, int], ...]  # (record, step) or (-1, 0)
    heads: tuple[int, ...]  # of each (launch, rank, layer, queue)


@dataclass(frozen=True)
class Verdict:
    """`safe` is None where not every interleaving was tried and none failed."""

    safe: bool | None
    why: str
    states: int


class Explorer:
    def __init__(self, program: Program, table: Table) -> None:
        self.model = Model(program, table)
        self.program = program
        self.lengths = [len(s) for s in self.model.streams]
        self.queue_keys = list(self.model.queues)
        self.start = State(
            (0,) * len(self.lengths),
            ((-1, 0),) * len(self.lengths),
            (0,) * (LAUNCHES * len(self.queue_keys)),
        )
        self._conflicts: dict[tuple[int, int], bool] = {}

    def places(self, state: State) -> Iterator[tuple[int, int, int]]:
        """(stream, launch, position) of each stream that has not ended and whose rank has ended the launch before."""
        for s, at in enumerate(state.at):
            if at < LAUNCHES * self.lengths[s]:
                launch, position = divmod(at, self.lengths[s])
                if not launch or position or self._rank_done(state, s, launch):
                    yield s, launch, position

    def steps(self, state: State, counters: np.ndarray) -> list[tuple[int, Step, int]]:
        """(stream, step, launch) that may run now."""
        out = []
        for s, launch, position in self.places(state):
            step = self.model.streams[s][position]
            waits = step.waits
            if step.queue is not None:
                inner = self._claimed(state, s, step, launch)
                if inner is None:
                    out.append((s, step, launch))  # the drain is over
                    continue
                waits, step = waits + inner.waits, inner
            if all(counters[c] >= (launch + 1) * self.model.totals[c] for c in waits):
                out.append((s, step, launch))
        return out

    def ahead(self, state: State, s: int, counters: np.ndarray) -> Iterator[tuple[int, Step]]:
        """(position, step) that stream `s` may begin although the step that it is at, which may run, has not ended."""
        launch, position = divmod(state.at[s], self.lengths[s])
        if self.model.streams[s][position].queue is not None:
            return  # what a queue holds is in no order with what follows the drain
        for at in range(position + 1, self.lengths[s]):
            step = self.model.streams[s][at]
            if step.queue is not None or any(counters[c] < (launch + 1) * self.model.totals[c] for c in step.waits):
                return
            yield launch * self.lengths[s] + at, step

    def _rank_done(self, state: State, s: int, launch: int) -> bool:
        w = self.program.workers
        first = s // w * w
        return all(state.at[i] >= launch * self.lengths[i] for i in range(first, first + w))

    def _head(self, s: int, step: Step, launch: int) -> int:
        rank, layer = s // self.program.workers, step.tag[1]
        return launch * len(self.queue_keys) + self.queue_keys.index((rank, layer, step.queue[0]))

    def _claimed(self, state: State, s: int, step: Step, launch: int) -> Step | None:
        """The step of a queue record that stream `s` runs or would claim next; None: nothing is left for it."""
        head = self._head(s, step, launch)
        queue = self.model.queues[self.queue_keys[head % len(self.queue_keys)]]
        record, at = state.inner[s]
        if record < 0:
            record = state.heads[head]
            if record >= step.queue[1]:
                return None
        return queue[record][at]

    def advance(self, state: State, s: int, launch: int) -> State:
        step = self.model.streams[s][state.at[s] % self.lengths[s]]
        if step.queue is None or self._claimed(state, s, step, launch) is None:
            return State(_with(state.at, s, state.at[s] + 1), state.inner, state.heads)
        if state.inner[s][0] < 0:
            state = self.claim(state, s, launch)
        record, done = state.inner[s]
        queue = self.model.queues[self.queue_keys[self._head(s, step, launch) % len(self.queue_keys)]]
        then = (-1, 0) if done + 1 == len(queue[record]) else (record, done + 1)
        return State(state.at, _with(state.inner, s, then), state.heads)

    def claim(self, state: State, s: int, launch: int) -> State:
        """A blocked record is claimed all the same."""
        step = self._drain(state, s)
        assert step is not None
        head = self._head(s, step, launch)
        record = state.heads[head]
        return State(state.at, _with(state.inner, s, (record, 0)), _with(state.heads, head, record + 1))

    def claims(self, state: State) -> list[tuple[int, int]]:
        out = []
        for s, launch, _ in self.places(state):
            drain = self._drain(state, s)
            if drain and state.inner[s][0] < 0 and self._claimed(state, s, drain, launch) is not None:
                out.append((s, launch))
        return out

    def unfinished(self, state: State, counters: np.ndarray) -> str:
        """What is wrong where nothing may run any more, or nothing."""
        if any(at < LAUNCHES * n for at, n in zip(state.at, self.lengths, strict=True)):
            return "deadlock"
        return "" if np.array_equal(counters, LAUNCHES * self.model.totals) else "totals"

    def _drain(self, state: State, s: int) -> Step | None:
        """The drain from which stream `s` may claim: the step that it is at, or the next one of its launch."""
        position = state.at[s] % self.lengths[s]
        for step in self.model.streams[s][position : position + 2]:
            if step.queue is not None:
                return step
        return None

    def conflict(self, a: Step, b: Step) -> bool:
        key = (id(a), id(b))
        if a is b or (a.split and b.split and a.split[:3] == b.split[:3]):
            return False  # either may claim it; of a split's parts only the last to arrive writes
        if key not in self._conflicts:
            self._conflicts[key] = _meet(a.writes, b.writes) or _meet(a.writes, b.reads) or _meet(a.reads, b.writes)
        return self._conflicts[key]


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _meet(a: list[Box], b: list[Box]) -> bool:
    return any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] and x[3] < y[4] and y[3] < x[4] for x in a for y in b)


class _Progress:
    """Counters along a path. Splits: the arrivals come with the part that happens to be last."""

    def __init__(self, explorer: Explorer) -> None:
        self.counters = np.zeros(len(explorer.model.totals), np.int64)
        self.parts: dict[tuple[int, ...], int] = {}

    def copy(self) -> _Progress:
        out = object.__new__(_Progress)
        out.counters, out.parts = self.counters.copy(), dict(self.parts)
        return out

    def add(self, step: Step, launch: int) -> None:
        if step.split is not None:
            *key, _, parts = step.split
            k = (launch, *key)
            self.parts[k] = self.parts.get(k, 0) + 1
            if self.parts[k] < parts:
                return
        for counter, n in step.adds:
            self.counters[counter] += n


def _begin(program: Program, table: Table, right: Right) -> tuple[Explorer, list[bytes]]:
    """The right outputs are those of the good program, or, where `program` has other phases, what these make."""
    right = right if right.forward == program.forward else expected(program, table)
    return Explorer(program, table), right.outputs


def explore(program: Program, table: Table, right: Right, limit: int) -> Verdict:
    """Visit every state that the counters allow, at most `limit`."""
    try:
        explorer, want = _begin(program, table, right)
    except Wild as e:
        return Verdict(False, str(e), 0)
    seen = {explorer.start}
    stack = [(explorer.start, _Progress(explorer))]
    suspects = 0
    while stack:
        state, progress = stack.pop()
        ready = explorer.steps(state, progress.counters)
        claims = explorer.claims(state)
        for (s, a, _), (t, b, _) in itertools.combinations(ready, 2):
            if explorer.conflict(a, b):
                for order in ((s, t), (t, s)):
                    if _outputs(explorer, np.random.default_rng(1), goal=state, then=order) != want:
                        return Verdict(False, f"race of {a.name} {a.tag} and {b.name} {b.tag}", len(seen))
                suspects += 1
        for s, a, _ in ready:
            for at, b in explorer.ahead(state, s, progress.counters):
                if explorer.conflict(a, b):
                    if _outputs(explorer, np.random.default_rng(1), goal=state, early=(s, at)) != want:
                        return Verdict(False, f"overlap of {a.name} {a.tag} and {b.name} {b.tag}", len(seen))
                    suspects += 1
        if not ready and not claims:
            if wrong := explorer.unfinished(state, progress.counters):
                return Verdict(False, wrong, len(seen))
            continue
        nexts: list[tuple[State, Step | None, int]] = []
        nexts += [(explorer.advance(state, s, launch), step, launch) for s, step, launch in ready]
        nexts += [(explorer.claim(state, s, launch), None, launch) for s, launch in claims]
        for after, step, launch in nexts:
            if after not in seen:
                seen.add(after)
                moved = progress.copy()
                if step:
                    moved.add(step, launch)
                stack.append((after, moved))
        if len(seen) > limit:
            return Verdict(None, "too many states", len(seen))
    if _outputs(explorer, np.random.default_rng(0)) != want:
        return Verdict(False, "wrong data", len(seen))
    safe, why = (None, "races without effect") if suspects else (True, "every interleaving")
    return Verdict(safe, why, len(seen))


def run(
    explorer: Explorer,
    rng,
    goal: State | None = None,
    then=(),
    early: tuple[int, int] | None = None,
    favour: list[int] | None = None,
    overlap: float = 0.0,
) -> Data | None:
    """Data after one interleaving; None where it deadlocks or totals are off.

    `goal` is reached first. There streams `then` go on, or the step `early` (stream, position) does its work, long
    before it ends. `overlap`: how often some step that may does so.
    """
    data, progress, state = Data(explorer.model), _Progress(explorer), explorer.start
    todo = list(then)
    done: set[tuple[int, int]] = set()  # steps whose work is done and that have not ended

    def begin(s: int, at: int) -> None:
        launch, position = divmod(at, explorer.lengths[s])
        data.execute(explorer.model.streams[s][position], launch)
        done.add((s, at))

    while True:
        ready = explorer.steps(state, progress.counters)
        claims = explorer.claims(state)
        if not ready and not claims:
            break
        if goal is not None and state == goal:
            goal = None
            if early is not None:
                begin(*early)
        if overlap and ready and rng.random() < overlap:
            s = ready[int(rng.integers(len(ready)))][0]
            waiting = [at for at, _ in explorer.ahead(state, s, progress.counters) if (s, at) not in done]
            if waiting:
                begin(s, waiting[int(rng.integers(len(waiting)))])
        if goal is not None:
            toward = [r for r in ready if _within(explorer.advance(state, r[0], r[2]), goal)]
            if not toward:
                holds = [c for c in claims if _within(explorer.claim(state, *c), goal)]
                if not holds:
                    return None
                state = explorer.claim(state, *holds[0])
                continue
            s, step, launch = toward[0]
        elif todo:
            s = todo.pop(0)
            found = [r for r in ready if r[0] == s]
            if not found:
                todo.clear()
                continue
            s, step, launch = found[0]
        elif not ready or (claims and rng.random() < 0.2):
            state = explorer.claim(state, *claims[int(rng.integers(len(claims)))])
            continue
        elif favour is not None:
            s, step, launch = min(ready, key=lambda r: favour[r[0]])
        else:
            s, step, launch = ready[int(rng.integers(len(ready)))]
        if (s, state.at[s]) in done and step is explorer.model.streams[s][state.at[s] % explorer.lengths[s]]:
            done.remove((s, state.at[s]))
        else:
            data.execute(step, launch)
        progress.add(step, launch)
        state = explorer.advance(state, s, launch)
    return None if explorer.unfinished(state, progress.counters) else data


def _outputs(explorer: Explorer, rng, **how) -> list[bytes] | None:
    data = run(explorer, rng, **how)
    return data and data.outputs(explorer.model)


def _within(state: State, goal: State) -> bool:
    return all(a <= b for a, b in zip(state.at, goal.at, strict=True)) and all(
        a <= b for a, b in zip(state.heads, goal.heads, strict=True)
    )


def adversarial(program: Program, table: Table, right: Right, seed: int, runs: int) -> Verdict:
    """Random interleavings with overlap, and such that always favour some workers."""
    try:
        explorer, want = _begin(program, table, right)
    except Wild as e:
        return Verdict(False, str(e), 0)
    rng = np.random.default_rng(seed)
    for number in range(runs):
        if _outputs(explorer, rng, **_manner(explorer, rng, number)) != want:
            return Verdict(False, "an adversarial run", number + 1)
    return Verdict(None, "no run failed", runs)


def unsafe(base: Program, program: Program, seed: int = 0, runs: int = 4) -> bool:
    """Whether an adversarial run shows that a program does not do what its base does."""
    table = make_table(base.dims, seed)
    return adversarial(program, table, expected(base, table), seed, runs).safe is False


def _manner(explorer: Explorer, rng, number: int) -> dict[str, object]:
    """Every other run always favours some streams; in the rest, steps overlap."""
    return {"favour": rng.permutation(len(explorer.lengths)).tolist()} if number % 2 else {"overlap": 0.3}


class Failure(AssertionError):
    """A deadlock, a wrong total, or something read that depends on the order."""


def check(program: Program, seed: int, rounds: int = 4) -> None:
    """Raise Failure unless steps read the same in adversarial runs as phase after phase, for a random table each."""
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        explorer = Explorer(program, make_table(program.dims, int(rng.integers(1 << 31))))
        want, data = in_order(explorer.model).seen, run(explorer, rng, **_manner(explorer, rng, number))
        if data is None:
            raise Failure("a deadlock, or a counter that does not end at its total")
        wrong = next((key for key, seen in want.items() if data.seen.get(key) != seen), None)
        if wrong is not None:
            name = program.forward.by_number[wrong[1][0]].name
            raise Failure(f"{name} (launch, tag, part: {wrong}) read something else")
