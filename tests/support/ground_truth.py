"""Decides whether a program is safe.

The module tries every interleaving of a small program, but only adversarial interleavings of a larger program. Tests
compare the verifier's answers with those of this module. This module shares no code with the verifier or the scheduler.
It knows only the records, the program's phases, and the rule that an instruction waits until its counters have their
totals.

A program becomes one stream of atomic steps per worker. A step is an instruction or one attention item. Each step lists
the counters that it waits for, the counters that it adds to, and the boxes (parts of buffers) that it accesses. Which
steps the counters allow depends only on the progress of each stream, so every reachable state can be visited. If no
reachable state allows two steps with conflicting boxes, all interleavings produce the same data, and running one of
them shows whether that data is right. Two launches run back to back: a rank starts the second launch when its own
streams have ended the first.

Before its current step has ended, a stream may begin later steps, in order, if the counters for which they wait have
reached their totals. If its next step is a drain (the instruction that claims and runs a queue's instructions), the
stream may also claim from that queue already. A step adds to its counters only when it ends, so steps begun early do
not change which states are reachable, but two steps of one stream may conflict."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from atomic_steps import LAUNCHES, Box, Data, Model, Right, Step, Table, Wild, expected, in_order, make_table

from megakernel.program import Program


@dataclass(frozen=True)
class State:
    """The progress of all streams and queues. `at` has the number of steps that each stream has completed, over all
    launches. `inner` has, for each stream, the queue record that the stream has claimed and the next step of that
    record. `heads` has the number of records claimed from each queue."""

    at: tuple[int, ...]
    inner: tuple[tuple[int, int], ...]  # (record, step), or (-1, 0) if none is claimed
    heads: tuple[int, ...]  # a number for each launch, rank, layer and queue


@dataclass(frozen=True)
class Verdict:
    """Whether a program is safe, the reason, and the number of states or interleavings tried. `safe` is None if no
    interleaving failed, but safety is not proved. Either not every interleaving was tried, or two steps that may run at
    the same time declare overlapping regions of a buffer, of which one is written."""

    safe: bool | None
    why: str
    states: int


class Explorer:
    def __init__(self, program: Program, table: Table) -> None:
        self.model = Model(program, table)
        self.program = program
        self.lengths = [len(s) for s in self.model.streams]
        self.queue_keys = list(self.model.queues)
        streams, queues = len(self.lengths), LAUNCHES * len(self.queue_keys)
        self.start = State((0,) * streams, ((-1, 0),) * streams, (0,) * queues)
        self._conflicts: dict[tuple[int, int], bool] = {}

    def places(self, state: State) -> Iterator[tuple[int, int, int]]:
        """Yield (stream, launch, position) of each unfinished stream whose rank has ended all earlier launches."""
        for s, at in enumerate(state.at):
            if at < LAUNCHES * self.lengths[s]:
                launch, position = divmod(at, self.lengths[s])
                if not launch or position or self._rank_done(state, s, launch):
                    yield s, launch, position

    def steps(self, state: State, counters: np.ndarray) -> list[tuple[int, Step, int]]:
        """Return (stream, step, launch) for every step that may run now."""
        out = []
        for s, launch, position in self.places(state):
            step = self.model.streams[s][position]
            waits = step.waits
            if step.queue is not None:
                inner = self._claimed(state, s, step, launch)
                if inner is None:
                    out.append((s, step, launch))  # the queue has nothing left, so the drain may end
                    continue
                waits, step = waits + inner.waits, inner
            if all(counters[c] >= (launch + 1) * self.model.totals[c] for c in waits):
                out.append((s, step, launch))
        return out

    def ahead(self, state: State, s: int, counters: np.ndarray) -> Iterator[tuple[int, Step]]:
        """Yield (position, step) for the later steps that stream `s` may begin before its current step has ended. Call
        this only if the current step may run. Positions count over all launches, as in `State.at`."""
        launch, position = divmod(state.at[s], self.lengths[s])
        if self.model.streams[s][position].queue is not None:
            # No need to look beyond a drain (which runs a queue's records). Once it has ended, other streams may still
            # run records of the queue, so conflicts with the steps after the drain are found in that state.
            return
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
        """Return the next step of the queue record that stream `s` has claimed or would claim next. Returns None if the
        queue has nothing left for it."""
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
        """Let stream `s` claim the next record of its queue, even if that record must still wait for counters."""
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
        """Return what is wrong with a state in which no step may run. The answer is "deadlock", "totals" if a counter
        has a wrong total, or "" if nothing is wrong."""
        if any(at < LAUNCHES * n for at, n in zip(state.at, self.lengths, strict=True)):
            return "deadlock"
        return "" if np.array_equal(counters, LAUNCHES * self.model.totals) else "totals"

    def _drain(self, state: State, s: int) -> Step | None:
        """Return the drain for which stream `s` may claim records now: its current step or, in one launch, the next."""
        position = state.at[s] % self.lengths[s]
        for step in self.model.streams[s][position : position + 2]:
            if step.queue is not None:
                return step
        return None

    def conflict(self, a: Step, b: Step) -> bool:
        key = (id(a), id(b))
        # These do not conflict: two streams that are about to claim the same step, because only one of them will run
        # it; and two parts of a split (attention over several KV ranges), because only the part that finishes last
        # writes the result.
        if a is b or (a.split and b.split and a.split[:3] == b.split[:3]):
            return False
        if key not in self._conflicts:
            self._conflicts[key] = _meet(a.writes, b.writes) or _meet(a.writes, b.reads) or _meet(a.reads, b.writes)
        return self._conflicts[key]


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _meet(a: list[Box], b: list[Box]) -> bool:
    return any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] and x[3] < y[4] and y[3] < x[4] for x in a for y in b)


class _Progress:
    """The counters' values along one path through the states. The parts of an attention split add to its counters only
    once, when the last of them ends."""

    def __init__(self, explorer: Explorer) -> None:
        self.counters = np.zeros(len(explorer.model.totals), np.int64)
        self.parts: dict[tuple[int, ...], int] = {}

    def copy(self) -> "_Progress":
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
    """Return an explorer of `program`, and the outputs that it should produce. The outputs in `right` are valid only
    for programs with the phases of `right.forward`. If `program` has other phases, its outputs are computed from its
    own phases."""
    right = right if right.forward == program.forward else expected(program, table)
    return Explorer(program, table), right.outputs


def explore(program: Program, table: Table, right: Right, limit: int) -> Verdict:
    """Visit every state that the counters allow, up to about `limit` states, and judge the program."""
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
    """Run one interleaving and return the data. Return None if it deadlocks or a counter does not end at its total.

    With `goal`, the run goes to that state first. In that state, the streams in `then` run one step each, in that
    order. `early` = (stream, position) names a step that does its work already in state `goal`. This step signals its
    counters only at its normal place in the stream. The rest of the order is random, unless `favour` has a number for
    each stream: then the stream with the lowest number runs first. `overlap` is the probability, before each step, that
    a random stream does the work of one of its later steps early."""
    data, progress, state = Data(explorer.model), _Progress(explorer), explorer.start
    todo = list(then)
    done: set[tuple[int, int]] = set()  # steps that have done their work but have not ended yet

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
    pairs = zip((*state.at, *state.heads), (*goal.at, *goal.heads), strict=True)
    return all(a <= b for a, b in pairs)


def adversarial(program: Program, table: Table, right: Right, seed: int, runs: int) -> Verdict:
    """Judge a program by `runs` random interleavings, of the two kinds that `_manner` describes."""
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
    """Return whether one of `runs` adversarial interleavings of `program` fails or has other outputs than `base`."""
    table = make_table(base.dims, seed)
    return adversarial(program, table, expected(base, table), seed, runs).safe is False


def _manner(explorer: Explorer, rng, number: int) -> dict[str, object]:
    """Return the arguments that make run `number` adversarial. An odd run always prefers some streams to others. In an
    even run, an instruction sometimes begins before the previous one of its stream has ended."""
    return {"favour": rng.permutation(len(explorer.lengths)).tolist()} if number % 2 else {"overlap": 0.3}


class Failure(AssertionError):
    """A deadlock, a counter that does not end at its total, or a step that reads data that it should not."""


def check(program: Program, seed: int, rounds: int = 4) -> None:
    """Raise Failure if an adversarial interleaving deadlocks or lets a step read wrong data. The right data is what the
    step reads when the phases run one after another. Each of the `rounds` interleavings uses a different random step
    table."""
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        explorer = Explorer(program, make_table(program.dims, int(rng.integers(1 << 31))))
        want, data = in_order(explorer.model).seen, run(explorer, rng, **_manner(explorer, rng, number))
        if data is None:
            raise Failure("the launch deadlocks, or a counter does not end at its total")
        wrong = next((key for key, seen in want.items() if data.seen.get(key) != seen), None)
        if wrong is not None:
            name = program.forward.by_number[wrong[1][0]].name
            where = f"(launch, step's tag, split part) = {wrong}"
            raise Failure(f"{name} read other values than in sequential execution: {where}")
