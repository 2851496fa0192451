"""Continuous batching: requests wait, run a chunk per step, and leave; one launch per step.

A step takes one token of every sequence that decodes, then fills what is left of its token budget with pieces of
prompts, in order of arrival. While a launch runs, the next step is planned and its table built: a token that the launch
is about to sample stands there as "what HISTORY will hold", so only a sequence that a stop token ends unforeseen
takes part once too often, and its row is ignored. Proposed tokens are added when the launch has ended, and after a step
that verifies some the next one is planned late: only its outcome says where sequences go on.

A token's bits depend on its own sequence only, so nothing of this shows in what is generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims
from ..program import Program
from ..runtime.backend import Backend, Output
from ..runtime.rows import Rows
from ..runtime.sampling import Ints
from ..runtime.steps import Steps
from .batch import Batch, Stats
from .constrained import force, write
from .constraint import Constraint
from .counts import Counts
from .logprobs import top_logprobs
from .programs import Programs
from .request import Request, Sequence
from .sampling import FINISH, SamplingParams
from .speculation import Speculation
from .tokens import Token as Token
from .tokens import Tokens
from .work import Part, Planner, Turns, Work


@dataclass(frozen=True)
class Step:
    """One launch that has ended: new tokens of each sequence and KV tokens after it; `output.logits` are not kept."""

    program: Program
    rows: list[int]
    contexts: list[int]
    logit_rows: int
    output: Output
    tokens: Tokens
    failed: list[Sequence]  # ended with it, because they cannot follow their grammar any further


class _Fates:
    """What became of each logit row of a step.

    `heard` is False for one of a sequence that had ended or had other tokens. Of the others that sample, `finish` says
    by index into FINISH why the token ends its sequence, `first` whether it is the sequence's first, and `waited` how
    many seconds it was waited for.
    """

    def __init__(self, rows: int) -> None:
        self.heard, self.first = np.zeros((2, rows), np.bool_)
        self.finish = np.zeros(rows, np.int64)
        self.waited = np.zeros(rows)


class Engine:
    """Runs requests on a backend. Not thread-safe: one caller adds, steps and aborts.

    `pages` is the size of the backend's KV pool and `step_tokens` the token budget of a step; the other limits are
    those of `dims`. With `prefix_cache`, prompts that begin alike share pages; with `speculation`, steps verify
    proposed tokens. Token ids go in and come out; `Transcript` makes text of them.
    """

    def __init__(
        self,
        backend: Backend,
        programs: Programs,
        dims: Dims,
        *,
        pages: int,
        step_tokens: int,
        eos_ids: frozenset[int],
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        self.backend = backend
        self.programs = programs
        self.dims = dims
        self._eos_ids = eos_ids
        self._batch = Batch(dims, pages=pages, step_tokens=step_tokens, prefix_cache=prefix_cache)
        self._step_tokens, self._speculation = step_tokens, speculation
        self._steps = Steps(self._batch.slots.pages, self._batch.slots.sampling)
        self._planner = Planner(self._batch.slots)
        self._under_way: Work | None = None
        self._failing: list[Sequence] = []  # of the launch under way, those that end with it
        self._requests = 0

    # -- requests

    @property
    def idle(self) -> bool:
        """Nobody waits or runs; then no launch is under way either."""
        return not self._batch.waiting and not len(self._batch.slots.order)

    @property
    def stats(self) -> Stats:
        return self._batch.stats

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        tag: int = 0,
        client: str = "",
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a prompt, whose tokens will carry `tag`; clients take turns where several have prompts that wait.

        `constraint` is what `Grammars` has made of `params`. Raises MegakernelError where the prompt can never run.
        """
        prompt = self.check(prompt_ids, params)
        if (constraint is not None) != params.constrained:
            raise AssertionError("a constraint belongs to parameters that ask for it")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
            raise MegakernelError("min_tokens forbids all of allowed_token_ids: they end the text")
        request = Request(self._requests, prompt, params, stop_ids, tag, client)
        self._requests += 1
        limit = self._length_limit(len(prompt), params)
        request.choices = [Sequence(request, choice, limit, self._batch.slots) for choice in range(params.n)]
        for sequence in request.choices if constraint else ():
            sequence.constraint = constraint.copy() if constraint else None
        self._batch.add(request)
        return request

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> list[int]:
        """The prompt as plain ints, or the reason why it cannot run."""
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise MegakernelError("the prompt is empty: give it at least one token")
        wrong = next((t for t in prompt if not 0 <= t < self.dims.vocab), None)
        if wrong is not None:
            raise MegakernelError(f"prompt token {wrong} is outside the vocabulary of {self.dims.vocab}")
        if len(prompt) >= self.dims.max_context:
            raise MegakernelError(
                f"the prompt has {len(prompt)} tokens and the context {self.dims.max_context}, which must also hold"
                " one generated token: shorten the prompt or raise the context"
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            wrong = next((t for t in ids if t >= self.dims.vocab), None)
            if wrong is not None:
                raise MegakernelError(f"{name}: token {wrong} is outside the vocabulary of {self.dims.vocab}")
        # The last token generated is never fed back, so it needs no room.
        needed, pages = self._batch.pages_for(self._length_limit(len(prompt), params) - 1), self.stats.pages
        if needed > pages:
            raise MegakernelError(
                f"prompt and max_tokens need {needed} KV pages and the pool has {pages}: lower max_tokens"
            )
        return prompt

    def abort(self, request: Request) -> None:
        """Forget a request; its choices that run end with reason `abort`."""
        for sequence in request.choices:
            self._batch.finish(sequence, "abort")
        self._settle()

    def stop(self, request: Request, choice: int) -> None:
        """End one choice where its reader found a stop string."""
        self._batch.finish(request.choices[choice], "stop")
        self._settle()

    def reset_prefix_cache(self) -> None:
        """Requests admitted from now on compute their prompts themselves."""
        self._batch.forget()

    # -- steps

    def step(self, *, trace: bool = False) -> Step:
        """Wait for the launch under way, start the next one and tell what the ended one brought; there must be work.

        `trace` is for the launches that this call starts: the one it returns is traced if the last call asked, or if
        nothing was under way. After an exception nothing is under way and every request waits, to compute again what
        was lost; tokens of a launch that had ended may remain untold, so abort the requests that ran.
        """
        try:
            if self._under_way is None:
                self._start(self._prepare(), trace)
            work = self._under_way
            if work is None or work.launch is None or work.program is None:
                raise AssertionError("a step without work")
            late = work.verifies
            ahead = None if late else self._prepare()
            if ahead:
                self._build(ahead)
            output = _own(work.launch.wait(), work.part.turns)
            self._under_way = None
            ended = perf_counter()
            failed = self._fail()
            fates = self._advance(work, output, ended)
            self._start(self._prepare() if late else ahead, trace)
            if self._speculation:
                self._speculation.times.record(work.program, output.seconds)
                if late:
                    self._speculation.times.record_late(perf_counter() - ended)
        except BaseException:
            self._reset()
            raise
        turns, start, _ = work.part
        counts, contexts = turns.count.tolist(), (start + turns.count).tolist()
        return Step(work.program, counts, contexts, len(turns.chunk), output, _read(turns, output, fates), failed)

    def run(self) -> Iterator[Step]:
        """Step until nothing is left."""
        while not self.idle:
            yield self.step()

    def close(self) -> None:
        """Abort what runs and free the backend."""
        self._reset()
        self.backend.close()

    def _prepare(self) -> Work | None:
        """Plan the step after the launches so far; None where nobody can take part."""
        ones, pieces = self._batch.plan()
        if not len(ones) and not pieces:
            return None
        part = self._planner.plan(ones, pieces)
        self._batch.unhold_computed(part.turns.slot)
        if self._speculation:
            self._speculation.read(part)
        return Work(part, self._batch.take_histories())

    def _build(self, work: Work) -> None:
        """Choose the program and make the table."""
        turns, _, tokens = work.part
        work.program = self.programs.get(len(tokens), max(len(turns.chunk), 1))
        work.table = self._steps.build(work.program.dims, Rows(*work.part))

    def _start(self, work: Work | None, trace: bool) -> None:
        """Launch a step, unless everybody in it has ended meanwhile."""
        if work is None:
            return
        constrained = np.count_nonzero(self._batch.slots.constrained)
        forced = force(work, self._batch, self.programs, self._step_tokens) if constrained else {}
        extended = work.verifies
        if self._speculation:
            extended |= self._speculation.extend(
                work, self._batch, tokens=self._step_tokens, logit_rows=self.programs.most_logit_rows
            )
        for slot, start, tokens in work.histories:
            self.backend.write_history(slot, start, tokens)
        if not np.count_nonzero(work.part.turns.alive(self._batch.slots)):
            return
        if extended or work.table is None:
            self._build(work)
        assert work.program is not None and work.table is not None
        if forced:
            self._failing = write(work.table, work.part, forced)
        work.launch = self.backend.start(work.program, work.table, trace=trace)
        self._under_way = work

    def _fail(self) -> list[Sequence]:
        """End the sequences that cannot follow their grammar any further, but for those that have ended already."""
        failed = [sequence for sequence in self._failing if sequence.finish_reason is None]
        self._failing = []
        for sequence in failed:
            self._batch.finish(sequence, "abort")
        return failed

    def _settle(self) -> None:
        """A launch whose last sequence has left is waited for, so that an idle engine is at rest."""
        if self.idle and self._under_way and self._under_way.launch:
            try:
                self._under_way.launch.wait()
                self._under_way = None
            except BaseException:
                self._reset()
                raise

    def _reset(self) -> None:
        """Nothing that a lost launch computed counts: everybody waits again, and no page is known."""
        work, self._under_way = self._under_way, None
        self._failing = []
        if work and work.launch:
            work.launch.abort()
        self._batch.reset()

    # -- planning

    def _length_limit(self, prompt: int, params: SamplingParams) -> int:
        context = self.dims.max_context
        return context if params.max_tokens is None else min(context, prompt + params.max_tokens)

    # -- outcomes

    def _advance(self, work: Work, output: Output, now: float) -> _Fates:
        """Append the sampled tokens and end the sequences that end with them."""
        (turns, _, _), slots, tokens = work.part, self._batch.slots, output.tokens
        fates = _Fates(len(tokens))
        if work.verifies:
            self._verify(work.part, tokens, now, fates)
            return fates
        plain = turns.alive(slots)[turns.chunk] & turns.samples
        for row in (~plain).nonzero()[0].tolist():
            self._take(work.part, row, int(tokens[row]), now, fates)
        fates.heard |= plain
        at = _index(plain)
        slot = turns.slot[turns.chunk][at]
        fates.waited[at] = now - slots.last_token_at[slot]
        fates.first[at] = slots.known[slot] == slots.prompt[slot]
        fates.finish[at] = finish = slots.append(slot, tokens[at], now)
        for sequence, reason in zip(turns.sequence[turns.chunk][at][finish > 0], finish[finish > 0], strict=True):
            self._batch.finish(sequence, str(FINISH[reason]))
        made = int(np.count_nonzero(fates.heard & turns.samples))
        self._batch.counts += Counts(made, made)
        return fates

    def _verify(self, part: Part, tokens: Ints, now: float, fates: _Fates) -> None:
        """`_advance` where tokens are proposed, so that whether a row counts depends on the one before it."""
        turns = part.turns
        for chunk, (sequence, proposed) in enumerate(zip(turns.sequence, turns.proposed.tolist(), strict=True)):
            mine = (turns.chunk == chunk).nonzero()[0]
            for row in mine.tolist():
                self._take(part, row, int(tokens[row]), now, fates)
            made = int(np.count_nonzero(fates.heard[mine] & turns.samples[mine]))
            self._batch.counts += Counts(made, int(made > 0))
            if made and proposed:
                if self._speculation and sequence.constraint is None:  # else they were forced
                    self._batch.counts += Counts(proposed=proposed, accepted=made - 1)
                    self._speculation.learn(sequence, proposed, made - 1)
                if sequence.finish_reason is None:
                    self._batch.shorten(sequence)

    def _take(self, part: Part, row: int, token: int, now: float, fates: _Fates) -> None:
        """The sampled token of a logit row joins its sequence, if that is what the row was computed for."""
        turns, chunk = part.turns, part.turns.chunk[row]
        sequence = turns.sequence[chunk]
        if sequence.finish_reason is not None:
            return
        if turns.samples[row]:
            before, known = turns.after[row], sequence.tokens
            if before >= 0 and (len(known) != part.start[chunk] + turns.index[row] + 1 or known[-1] != before):
                return  # a token proposed before it was wrong
            fates.first[row], fates.waited[row] = sequence.outputs == 0, now - sequence.waits_since
            if reason := sequence.append(token, now):
                self._batch.finish(sequence, reason)
                fates.finish[row] = FINISH.index(reason)
        fates.heard[row] = True


def _index(rows: NDArray[np.bool_]) -> NDArray[np.bool_] | slice:
    """What gives some rows of a column: a slice where it is all of them, which costs nothing."""
    return slice(None) if np.count_nonzero(rows) == len(rows) else rows


def _read(turns: Turns, output: Output, fates: _Fates) -> Tokens:
    """The step's tokens, and the scores of prompts to their requests."""
    logits = iter(output.logits) if turns.read else iter(())
    told, best = fates.heard & turns.samples, {}
    for row in turns.reported:
        top, token, logprob = int(turns.top[row]), int(output.tokens[row]), float(output.logprobs[row])
        mine = next(logits) if top else None
        if not fates.heard[row]:
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
    chunk = turns.chunk[at]
    return Tokens(
        sequence=turns.sequence[chunk],
        tag=turns.tag[chunk],
        choice=turns.choice[chunk],
        token_id=output.tokens[at],
        logprob=output.logprobs[at],
        finish=fates.finish[at],
        first=fates.first[at],
        waited=fates.waited[at],
        top=best,
    )


def _own(output: Output, turns: Turns) -> Output:
    """A copy of what the host reads of an output, before the next launch overwrites it: the logits of `top` rows."""
    rows = len(turns.top)
    return replace(
        output,
        tokens=output.tokens[:rows].copy(),
        logprobs=output.logprobs[:rows].copy(),
        logits=output.logits[turns.read],
    )
