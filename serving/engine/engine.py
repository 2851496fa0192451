"""Continuous batching with chunked prefill. Each step is one launch of a compiled program. A step takes one token of
every decoding sequence. Then it fills the rest of its token budget with chunks of prompts, in the order of arrival.
docs/architecture.md says how steps are planned while launches run, and why this changes no token."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dims, StepTable
from megakernel.model import Checkpoint
from megakernel.program import Program
from megakernel.runtime.backend import Backend, Launch, Output
from megakernel.runtime.steps import StepRows, Steps
from megakernel.serving.engine.constrained import follow, force, write
from megakernel.serving.engine.grammars import Constraint
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import (
    VERIFIED_ROWS,
    Objects,
    PlannedRows,
    Planner,
    Request,
    Sequence,
    Turns,
    extended,
)
from megakernel.serving.engine.sampling import FINISH, Begun, SamplingParams, TokenIds, Tokens
from megakernel.serving.engine.scheduler import Batch, Counts, Stats
from megakernel.serving.engine.speculation import Speculation

_BLOCK = 64  # size of the blocks of logits in `top_logprobs`
_NO_ROWS: NDArray[np.float32] = np.empty((0, 0), np.float32)


@dataclass
class Step:
    """A finished launch, with the tokens that it generated. `output.logits` and `output.hidden` have only the rows that
    requests needed on the host."""

    program: Program
    part: PlannedRows
    output: Output
    failed: list[Sequence]  # sequences that ended because their constraint allows no continuation
    tokens: Tokens
    # The following arrays have one element for each generated token.
    sequence: Objects
    reader: NDArray[np.int64]  # numbers of the processes that read the tokens

    @property
    def rows(self) -> list[int]:
        """The number of tokens that the step computed for each of its sequences."""
        return self.part.turns.count.tolist()  # type: ignore[no-any-return]


@dataclass
class _Running:
    """A launch that the device is running or will run next, and the plan of the step that it computes."""

    part: PlannedRows
    # Whether the step computes proposed or forced tokens. Its results are then needed to plan the next step.
    verified: bool
    failing: list[Sequence]  # sequences that end when the launch ends, because their constraint allows no continuation
    program: Program
    launch: Launch


class _Results:
    """The results of a step, one array element per logit row (a row that samples a token or scores a prompt token).
    `heard` is False if the row is ignored, because its sequence had ended or a proposed token before the row was wrong.
    `first` says which sampled tokens are the first of their sequence. `finish` says whether and why a token ends its
    sequence, as an index into FINISH."""

    def __init__(self, heard: NDArray[np.bool_]) -> None:
        self.heard = heard
        self.first = np.zeros(len(heard), np.bool_)
        self.finish = np.zeros(len(heard), np.uint8)


class Engine:
    """Runs requests on a backend. It is not thread-safe: one thread adds requests, steps and aborts.

    `pages` is the number of pages in the backend's KV pool. `programs` limits the tokens of a step, and `dims` has the
    other limits. With `prefix_cache`, prompts with a common prefix share pages. With
    `speculation`, steps verify proposed tokens. The engine handles token ids only; `Transcript` converts them to text.
    """

    def __init__(
        self,
        backend: Backend,
        programs: Programs,
        dims: Dims,
        *,
        pages: int,
        eos_ids: frozenset[int],
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        self.backend = backend
        self.programs = programs
        self.dims = dims
        self._eos_ids = eos_ids
        self._batch = Batch(dims, pages=pages, step_tokens=programs.most_tokens, prefix_cache=prefix_cache)
        self._speculation = speculation
        self._steps = Steps(self._batch.slots.pages, self._batch.slots.sampling)
        self._planner = Planner(self._batch.slots)
        self._running: deque[_Running] = deque()  # oldest first
        self._requests = self._choices = 0

    # -- requests

    @property
    def idle(self) -> bool:
        """Whether no sequence waits or runs. A launch may still run whose results nobody needs."""
        return not self._batch.waiting and not len(self._batch.slots.order)

    @property
    def stats(self) -> Stats:
        return self._batch.stats

    def add(
        self,
        prompt_ids: Seq[int] | TokenIds,
        params: SamplingParams,
        *,
        first: int | None = None,
        reader: int = 0,
        client: str = "",
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a prompt. When prompts of several clients wait, the clients are admitted in turn.

        The choices (completions) are numbered from `first` on, by default after the choices of all earlier requests.
        `reader` is the number of the process that reads their tokens. If `params` restrict the output, `constraint`
        must be what `Grammars.get(params)` returned. Raises MegakernelError if the prompt can never run."""
        prompt = self.check(prompt_ids, params)
        if (constraint is not None) != params.constrained:
            raise AssertionError("Engine.add: pass `constraint` if, and only if, the sampling parameters ask for one")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
            raise MegakernelError(
                "min_tokens forbids every id in allowed_token_ids, because all of them end the text: allow another id"
            )
        first = self._choices if first is None else first
        request = Request(self._requests, prompt, params, stop_ids, first, reader, client)
        self._requests, self._choices = self._requests + 1, self._choices + params.n
        limit, slots = self._length_limit(len(prompt), params), self._batch.slots
        request.choices = [
            Sequence(request, choice, limit, slots, constraint and constraint.copy()) for choice in range(params.n)
        ]
        self._batch.add(request)
        return request

    def check(self, prompt_ids: Seq[int] | TokenIds, params: SamplingParams) -> TokenIds:
        """Return the prompt as an int32 array. Raises MegakernelError with the reason if the prompt can never run."""
        given = np.asarray(prompt_ids)
        if not len(given):
            raise MegakernelError("the prompt is empty: give it at least one token")
        outside = given[(given < 0) | (given >= self.dims.model.vocab)]
        if len(outside):
            raise MegakernelError(f"prompt token {outside[0]} is outside the vocabulary of {self.dims.model.vocab} ids")
        prompt = given.astype(np.int32, copy=False)
        if len(prompt) > self.dims.bucket.max_context:
            raise MegakernelError(
                f"the prompt has {len(prompt)} tokens, more than the context of {self.dims.bucket.max_context} tokens:"
                " shorten the prompt or raise the context"
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            wrong = next((t for t in ids if t >= self.dims.model.vocab), None)
            if wrong is not None:
                raise MegakernelError(f"{name}: token {wrong} is outside the vocabulary of {self.dims.model.vocab} ids")
        # Subtract one token, because the last generated token is never an input and so needs no K and V.
        needed, pages = self._batch.pages_for(self._length_limit(len(prompt), params) - 1), self.stats.pages
        if needed > pages:
            told = f"prompt and max_tokens need {needed} KV pages, but the pool has {pages}: lower max_tokens"
            raise MegakernelError(told)
        return prompt

    def abort(self, request: Request) -> None:
        """Abort a request. Its unfinished choices (completions) end with the finish reason `abort`."""
        for sequence in request.choices:
            self._batch.finish(sequence, "abort")

    def stop(self, request: Request, choice: int) -> None:
        """End one choice (completion) of a request, because a stop string was found in its text."""
        self._batch.finish(request.choices[choice], "stop")

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        """Replace the weights of `places`, which are pairs of a weight buffer and a layer, and empty the prefix cache.
        Raises MegakernelError if a request waits or runs."""
        if not self.idle:
            raise MegakernelError("cannot replace weights while requests wait or run: wait until they have ended")
        self._reset()
        self.backend.load_weights(checkpoint, places)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that requests admitted from now on compute their whole prompts."""
        self._batch.pool.forget()

    # -- steps

    def step(self, *, trace: bool = False) -> Step:
        """Wait for the running launch, start the next one, and return the finished step. The engine must not be idle.

        `trace` applies to the launches that this call starts. So the returned step is traced if the previous call set
        `trace`, or if this call sets `trace` and no launch was running. After an exception, no launch is running, and
        all requests wait in the queue to compute their lost keys and values again. Tokens that a launch has sampled may
        not have been returned, so the caller should abort the requests that ran."""
        try:
            if not self._running:
                self._start(*self._prepare(), trace)
            if not self._running:
                raise AssertionError("a step without work")
            running = self._running[0]
            ahead = None if running.verified else self._prepare()
            if ahead and self._queues(running.part.turns):
                self._start(*ahead, trace)
                ahead = None, None
            output = _own(running.launch.wait(), running.part.turns)
            self._running.popleft()
            ended = perf_counter()
            failed = [sequence for sequence in running.failing if sequence.finish_reason is None]
            for sequence in failed:
                self._batch.finish(sequence, "abort")
            results = self._advance(running.part, running.verified, output.tokens, ended)
            self._start(*(ahead or self._prepare()), trace)
            if self._speculation:
                self._speculation.times.record(running.program, output.seconds)
                if running.verified:
                    self._speculation.times.record_late(perf_counter() - ended)
        except BaseException:
            self._reset()
            raise
        return _report(running, output, results, failed, ended)

    def run(self) -> Iterator[Step]:
        """Run steps until no request is left, and yield each finished step."""
        while not self.idle:
            yield self.step()

    def close(self) -> None:
        """Abort the running launch and free the backend."""
        self._reset()
        self.backend.close()

    def _prepare(self) -> tuple[PlannedRows | None, tuple[Program, StepTable] | None]:
        """Plan the next step, which follows the running launch if there is one. Returns the step, or None if no
        sequence can run. The second value has the step's program and step table (inputs). It is None if no
        launch is running, because building them in advance would then save no time."""
        ones, prompts = self._batch.plan()
        if not len(ones) and not prompts:
            return None, None
        part = self._planner.plan(ones, prompts)
        if np.count_nonzero(self._batch.slots.holds):
            self._batch.unhold_computed(part.turns.slot)
        if self._speculation:
            self._speculation.read(part)
        return part, self._build(part) if self._running else None

    def _queues(self, turns: Turns) -> bool:
        """Whether the next step may be launched before the running one, whose plan is `turns`, has ended. It must wait
        if constraints or proposed tokens need the running step's results. It must also wait if the host has to read
        logits or hidden states, or write the device buffer HISTORY, between the two launches."""
        batch = self._batch
        waits = self._speculation or batch.histories or batch.slots.constraints
        return self.backend.queues and not (waits or turns.read or turns.pooled)

    def _build(self, part: PlannedRows) -> tuple[Program, StepTable]:
        program = self.programs.get(len(part.tokens), max(len(part.turns.chunk), 1))
        return program, self._steps.build(program.dims, StepRows(*part))

    def _start(self, part: PlannedRows | None, built: tuple[Program, StepTable] | None, trace: bool) -> None:
        """Launch a planned step, unless all its sequences have ended in the meantime. Forced and proposed tokens are
        added first, because they depend on the results of the previous launch. `built` has the program and the step
        table without such tokens, if there was time to build both in advance."""
        if part is None:
            return
        batch = self._batch
        constrained = batch.slots.constraints
        forced = follow(part, batch) if constrained else {}
        rows = min(self.programs.most_logit_rows, VERIFIED_ROWS)
        room = min(self.programs.most_tokens - len(part.tokens), rows - len(part.turns.chunk))
        runs = force(part, batch, forced, self.programs, room=room) if forced else {}
        if self._speculation:
            room -= sum(map(len, runs.values()))
            runs |= self._speculation.propose(part, batch, runs, room=room)
        for slot, start, tokens in batch.histories:
            self.backend.write_history(slot, start, tokens)
        batch.histories.clear()
        if runs:
            part = extended(part, batch.slots, runs)
        if not np.count_nonzero(part.turns.alive(batch.slots)):
            return
        program, table = built if built and not runs else self._build(part)
        failing = write(table, part, batch, forced) if constrained else []
        launch = self.backend.start(program, table, trace=trace)
        self._running.append(_Running(part, bool(runs), failing, program, launch))

    def _reset(self) -> None:
        """Abort the launches and ignore their results. Queue all sequences again, and empty the prefix cache."""
        launches, self._running = self._running, deque()
        if launches:
            launches[0].launch.abort()
        self._batch.reset()

    # -- planning

    def _length_limit(self, prompt: int, params: SamplingParams) -> int:
        # The last token is never an input, so a prompt that fills the context is still followed by one token.
        context = max(self.dims.bucket.max_context, prompt + 1)
        return context if params.max_tokens is None else min(context, prompt + params.max_tokens)

    # -- results

    def _advance(self, part: PlannedRows, verified: bool, tokens: NDArray[np.int32], now: float) -> _Results:
        """Append the sampled tokens to their sequences and end those sequences that are complete."""
        turns, slots = part.turns, self._batch.slots
        alive = turns.alive(slots)[turns.chunk]
        results = _Results(alive.copy())
        for row in [] if np.count_nonzero(alive) == len(alive) else (~alive).nonzero()[0].tolist():
            sequence = turns.sequence[turns.chunk[row]]
            results.heard[row] = sequence.finish_reason is None  # an unfinished sequence without a slot was preempted
            if results.heard[row] and turns.samples[row]:
                results.first[row] = sequence.outputs == 0
                results.finish[row] = sequence.append(int(tokens[row]))
        sampling = alive & turns.samples
        if verified:
            self._verify(part, sampling, tokens, now, results)
            return results
        self._append(turns, sampling, tokens, now, results)
        for row in results.finish.nonzero()[0].tolist():
            self._batch.finish(turns.sequence[turns.chunk[row]], str(FINISH[results.finish[row]]))
        made = int(np.count_nonzero(results.heard & turns.samples))
        self._batch.totals.counts += Counts(made, made)
        return results

    def _append(
        self, turns: Turns, rows: NDArray[np.bool_], tokens: NDArray[np.int32], now: float, results: _Results
    ) -> None:
        """Append the sampled tokens of the selected `rows`, at most one per sequence, to their running sequences."""
        at = _index(rows)
        results.first[at], results.finish[at] = self._batch.slots.append(turns.slot[turns.chunk[at]], tokens[at], now)

    def _verify(
        self, part: PlannedRows, sampling: NDArray[np.bool_], tokens: NDArray[np.int32], now: float, results: _Results
    ) -> None:
        """Append the sampled tokens for a step with proposed or forced tokens. Each row of a sequence assumes that its
        input token is right. So once a row samples another token than the next row assumes, or ends the sequence, the
        rows after it are ignored."""
        turns, slots = part.turns, self._batch.slots
        position = part.start[turns.chunk] + turns.index + 1
        ended = np.zeros(len(turns.slot), np.int64)  # by chunk (sequence of the step): an index into FINISH
        for depth in range(int(turns.depth.max(initial=0)) + 1):
            rows = sampling & (turns.depth == depth)
            if depth:
                chunk = turns.chunk[rows]
                slot = turns.slot[chunk]
                known = slots.known[slot]
                right = (known == position[rows]) & (slots.tokens[slot, known - 1] == turns.after[rows])
                results.heard[rows] = right & (ended[chunk] == 0)
                rows &= results.heard
            self._append(turns, rows, tokens, now, results)
            ended[turns.chunk[rows]] = results.finish[rows]
        made = np.bincount(turns.chunk[results.heard & turns.samples], minlength=len(ended))
        added = np.bincount(turns.chunk[turns.after >= 0], minlength=len(ended))
        self._batch.totals.counts += Counts(int(made.sum()), int(np.count_nonzero(made)))
        for chunk in ((made > 0) & ((added > 0) | (ended > 0))).nonzero()[0].tolist():
            sequence, accepted = turns.sequence[chunk], int(made[chunk]) - 1
            if ended[chunk]:
                self._batch.finish(sequence, str(FINISH[ended[chunk]]))
            if not added[chunk]:
                continue
            # Forced tokens are not guesses, so they do not count in the statistics of proposals.
            if self._speculation and (sequence.constraint is None or sequence.constraint.idle):
                self._batch.totals.counts += Counts(proposed=int(added[chunk]), accepted=accepted)
                self._speculation.learn(sequence, int(added[chunk]), accepted)
            if sequence.finish_reason is None:
                self._batch.shorten(sequence)


def _index(rows: NDArray[np.bool_]) -> NDArray[np.bool_] | slice:
    """Return an index for arrays that selects the True rows: a slice if all are True, because that avoids a copy."""
    return slice(None) if np.count_nonzero(rows) == len(rows) else rows


def _report(running: _Running, output: Output, results: _Results, failed: list[Sequence], ended: float) -> Step:
    """Return the finished step, and append the log-probabilities of scored prompt tokens to their requests."""
    turns = running.part.turns
    logits = iter(output.logits) if turns.read else iter(())
    told, best = results.heard & turns.samples, {}
    for row in turns.reported:
        top, token, logprob = int(turns.top[row]), int(output.tokens[row]), float(output.logprobs[row])
        mine = next(logits) if top else None
        if not results.heard[row]:
            continue
        found = {} if mine is None else top_logprobs(mine, top, token, logprob)
        found[token] = logprob
        if told[row]:
            best[int(np.count_nonzero(told[:row]))] = found
        else:
            request = turns.sequence[turns.chunk[row]].request
            request.prompt_logprobs.append(logprob)
            request.prompt_top_logprobs.append(found)
    at = _index(told)
    chunk, first = turns.chunk[at], results.first[at]
    number, sequence = turns.number[chunk], turns.sequence[chunk]
    for index, row in enumerate(turns.pooled):
        if results.heard[row]:
            turns.sequence[turns.chunk[row]].request.pool(output.hidden[index])
    starting = first.nonzero()[0].tolist() if np.count_nonzero(first) else []
    tokens = Tokens(
        at=ended,
        choice=number,
        token_id=output.tokens[at],
        logprob=output.logprobs[at],
        finish=results.finish[at],
        top=best,
        begun={index: _begun(sequence[index]) for index in starting},
    )
    return Step(
        program=running.program,
        part=running.part,
        output=output,
        failed=failed,
        tokens=tokens,
        sequence=sequence,
        reader=turns.reader[chunk],
    )


def _begun(sequence: Sequence) -> Begun:
    """Return what is sent with the first token of a sequence, such as the time of its admission."""
    request = sequence.request
    if sequence.choice:
        return Begun(sequence.admitted_at)
    pooled = None if request.pooled is None else (request.pooled / request.pooled_rows).astype(np.float32)
    return Begun(sequence.admitted_at, request.cached_tokens or 0, pooled)


def _own(output: Output, turns: Turns) -> Output:
    """Copy what the host needs of a launch's outputs, because the next launch overwrites them. Of the logits,
    only the rows for which requests want top log-probabilities are copied."""
    rows = len(turns.top)
    logits = output.logits[turns.read] if turns.read else _NO_ROWS
    hidden = output.hidden[turns.pooled] if turns.pooled else _NO_ROWS
    scores = output.tokens[:rows].copy(), output.logprobs[:rows].copy()
    return Output(*scores, logits, hidden, output.seconds, output.trace)


def top_logprobs(logits: NDArray[np.float32], count: int, token: int, logprob: float) -> dict[int, float]:
    """Return the `count` most likely tokens of `logits` [vocab] as {id: log-softmax}, most likely first, ties by id.
    `logprob` is the log-softmax of `token`, so the log-sum-exp of all logits is logits[token] - logprob."""
    if count == 0:
        return {}
    whole = len(logits) // _BLOCK * _BLOCK
    # To sort only a few logits, take the maximum of each block of _BLOCK logits. At least `count` logits reach the
    # `count`-th largest of these maxima, so no smaller logit is among the `count` largest ones.
    highest = np.append(logits[:whole].reshape(-1, _BLOCK).max(axis=1), logits[whole:])
    least = np.partition(highest, -count)[-count] if count < len(highest) else -np.inf
    candidates = np.flatnonzero(logits >= least)
    order = candidates[np.lexsort((candidates, -logits[candidates]))][:count]
    log_sum = float(logits[token]) - logprob
    return {int(i): float(logits[i]) - log_sum for i in order}
