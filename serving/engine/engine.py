"""Continuous batching with chunked prefill. Each step is one launch.

A step takes one token of every decoding sequence, then fills the rest of its token budget with chunks of prompts, in
the order of arrival. While a launch runs, the engine plans the next step and builds its step table, which holds the
inputs of the launch. Tokens that the running launch has yet to sample are inputs of the next step too. For such a
token, the table says where the launch will store it in the buffer HISTORY. If the token turns out to end its sequence,
the sequence still has a row in the next step, and the engine ignores the row's result.

With speculative decoding, the engine adds proposed tokens to a planned step when the previous launch has ended. While a
step with proposed tokens runs, the engine does not plan the next step, because the number of accepted tokens decides at
which position each sequence continues.

A sequence's results do not depend on the other sequences, bit for bit, so none of this changes the generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.isa import Dims
from megakernel.program import Program
from megakernel.runtime.backend import Backend, Output
from megakernel.runtime.rows import Rows
from megakernel.runtime.sampling import Ints
from megakernel.runtime.steps import Steps
from megakernel.serving.engine.constrained import force, write
from megakernel.serving.engine.constraint import Constraint
from megakernel.serving.engine.counts import Counts
from megakernel.serving.engine.logprobs import top_logprobs
from megakernel.serving.engine.plan import Part, Planner, Turns, Work
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import Request, Sequence
from megakernel.serving.engine.sampling import FINISH, SamplingParams
from megakernel.serving.engine.scheduler import Batch, Stats
from megakernel.serving.engine.speculation import Speculation
from megakernel.serving.engine.tokens import Token as Token
from megakernel.serving.engine.tokens import Tokens


@dataclass(frozen=True)
class Step:
    """A finished launch, with the tokens that it generated.

    `rows` holds each sequence's number of token rows in the step, and `contexts` its number of tokens in the KV cache
    after the step. `output.logits` is empty unless the step's requests needed logits on the host.
    """

    program: Program
    rows: list[int]
    contexts: list[int]
    logit_rows: int
    output: Output
    tokens: Tokens
    failed: list[Sequence]  # sequences that ended because their constraint allows no continuation


class _Fates:
    """What became of each logit row of a step, as arrays with one element per logit row.

    `heard` is False if the row is ignored, because its sequence had ended or a proposed token before it was wrong. The
    other arrays describe the tokens that the remaining rows sampled. `finish` is an index into FINISH, the reasons why
    a token ends its sequence. `first` is True for the sequence's first token. `waited` is the time in seconds since the
    sequence's previous token or, for its first token, since the request was added.
    """

    def __init__(self, rows: int) -> None:
        self.heard, self.first = np.zeros((2, rows), np.bool_)
        self.finish = np.zeros(rows, np.int64)
        self.waited = np.zeros(rows)


class Engine:
    """Runs requests on a backend. It is not thread-safe: one thread adds requests, steps and aborts.

    `pages` is the size of the backend's KV pool and `step_tokens` the token budget of a step; `dims` has the other
    limits. With `prefix_cache`, prompts with a common prefix share pages. With `speculation`, steps verify proposed
    tokens. The engine handles token ids only; `Transcript` converts them to text.
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
        self._failing: list[Sequence] = []  # sequences that end when the running launch ends
        self._requests = 0

    # -- requests

    @property
    def idle(self) -> bool:
        """Whether no sequence waits or runs. An idle engine has no running launch."""
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
        """Queue a prompt. When prompts of several clients wait, the clients are admitted in turn.

        Every token that the request generates carries `tag`. If `params` restrict the output, `constraint` must be what
        `Grammars.get(params)` returned. Raises MegakernelError if the prompt can never run.
        """
        prompt = self.check(prompt_ids, params)
        if (constraint is not None) != params.constrained:
            raise AssertionError("Engine.add: pass `constraint` if, and only if, the sampling parameters ask for one")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
            raise MegakernelError(
                "min_tokens forbids every id in allowed_token_ids, because all of them end the text: allow another id"
            )
        request = Request(self._requests, prompt, params, stop_ids, tag, client)
        self._requests += 1
        limit = self._length_limit(len(prompt), params)
        request.choices = [Sequence(request, choice, limit, self._batch.slots) for choice in range(params.n)]
        for sequence in request.choices if constraint else ():
            sequence.constraint = constraint.copy() if constraint else None
        self._batch.add(request)
        return request

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> list[int]:
        """Return the prompt as a list of Python ints. Raises MegakernelError with the reason if it can never run."""
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise MegakernelError("the prompt is empty: give it at least one token")
        wrong = next((t for t in prompt if not 0 <= t < self.dims.vocab), None)
        if wrong is not None:
            raise MegakernelError(f"prompt token {wrong} is outside the vocabulary of {self.dims.vocab}")
        if len(prompt) >= self.dims.max_context:
            raise MegakernelError(
                f"the prompt has {len(prompt)} tokens, but the context of {self.dims.max_context} tokens must also hold"
                " one generated token: shorten the prompt or raise the context"
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            wrong = next((t for t in ids if t >= self.dims.vocab), None)
            if wrong is not None:
                raise MegakernelError(f"{name}: token {wrong} is outside the vocabulary of {self.dims.vocab}")
        # The last generated token is never an input, so it needs no KV.
        needed, pages = self._batch.pages_for(self._length_limit(len(prompt), params) - 1), self.stats.pages
        if needed > pages:
            raise MegakernelError(
                f"prompt and max_tokens need {needed} KV pages, but the pool has {pages}: lower max_tokens"
            )
        return prompt

    def abort(self, request: Request) -> None:
        """Abort a request. Its open choices end with the reason `abort`."""
        for sequence in request.choices:
            self._batch.finish(sequence, "abort")
        self._settle()

    def stop(self, request: Request, choice: int) -> None:
        """End one choice, because its reader found a stop string."""
        self._batch.finish(request.choices[choice], "stop")
        self._settle()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that requests admitted from now on compute their whole prompts."""
        self._batch.forget()

    # -- steps

    def step(self, *, trace: bool = False) -> Step:
        """Wait for the running launch, start the next one, and return the finished step. The engine must not be idle.

        `trace` applies to the launches that this call starts. So the returned step is traced if the previous call set
        `trace`, or if this call sets `trace` and no launch was running. After an exception, no launch is running, and
        all requests wait in the queue to compute their lost KV again. Tokens of the finished launch may then be
        missing, so the caller should abort the requests that ran.
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
        """Step until the engine is idle."""
        while not self.idle:
            yield self.step()

    def close(self) -> None:
        """Abort the running launch and free the backend."""
        self._reset()
        self.backend.close()

    def _prepare(self) -> Work | None:
        """Plan the next step, which follows the running launch if there is one. Returns None if no sequence can run."""
        ones, pieces = self._batch.plan()
        if not len(ones) and not pieces:
            return None
        part = self._planner.plan(ones, pieces)
        self._batch.unhold_computed(part.turns.slot)
        if self._speculation:
            self._speculation.read(part)
        return Work(part, self._batch.take_histories())

    def _build(self, work: Work) -> None:
        """Choose the program of a planned step and build its step table, the inputs of the launch."""
        turns, _, tokens = work.part
        work.program = self.programs.get(len(tokens), max(len(turns.chunk), 1))
        work.table = self._steps.build(work.program.dims, Rows(*work.part))

    def _start(self, work: Work | None, trace: bool) -> None:
        """Launch a planned step, unless all its sequences have ended in the meantime."""
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
        """End the sequences whose constraint allows no continuation. Returns those that had not ended already."""
        failed = [sequence for sequence in self._failing if sequence.finish_reason is None]
        self._failing = []
        for sequence in failed:
            self._batch.finish(sequence, "abort")
        return failed

    def _settle(self) -> None:
        """If no sequence is left, wait for the running launch, so that an idle engine has no running launch."""
        if self.idle and self._under_way and self._under_way.launch:
            try:
                self._under_way.launch.wait()
                self._under_way = None
            except BaseException:
                self._reset()
                raise

    def _reset(self) -> None:
        """Drop the running launch and its results: all sequences wait again, and the prefix cache is empty."""
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
        """Append the sampled tokens to their sequences and end those sequences that are complete."""
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
        """Do the work of `_advance` for a step with proposed tokens. A row after a wrong proposed token is ignored."""
        turns = part.turns
        for chunk, (sequence, proposed) in enumerate(zip(turns.sequence, turns.proposed.tolist(), strict=True)):
            mine = (turns.chunk == chunk).nonzero()[0]
            for row in mine.tolist():
                self._take(part, row, int(tokens[row]), now, fates)
            made = int(np.count_nonzero(fates.heard[mine] & turns.samples[mine]))
            self._batch.counts += Counts(made, int(made > 0))
            if made and proposed:
                # Tokens that a constraint forced are not guesses, so they do not count as proposals.
                if self._speculation and sequence.constraint is None:
                    self._batch.counts += Counts(proposed=proposed, accepted=made - 1)
                    self._speculation.learn(sequence, proposed, made - 1)
                if sequence.finish_reason is None:
                    self._batch.shorten(sequence)

    def _take(self, part: Part, row: int, token: int, now: float, fates: _Fates) -> None:
        """Append the sampled token of a logit row to its sequence, unless the row must be ignored (see `_Fates`)."""
        turns, chunk = part.turns, part.turns.chunk[row]
        sequence = turns.sequence[chunk]
        if sequence.finish_reason is not None:
            return
        if turns.samples[row]:
            before, known = turns.after[row], sequence.tokens
            if before >= 0 and (len(known) != part.start[chunk] + turns.index[row] + 1 or known[-1] != before):
                return  # an earlier proposed token was wrong
            fates.first[row], fates.waited[row] = sequence.outputs == 0, now - sequence.waits_since
            if reason := sequence.append(token, now):
                self._batch.finish(sequence, reason)
                fates.finish[row] = FINISH.index(reason)
        fates.heard[row] = True


def _index(rows: NDArray[np.bool_]) -> NDArray[np.bool_] | slice:
    """Return an array index that selects the True rows. If all rows are True, it is a slice, to avoid a copy."""
    return slice(None) if np.count_nonzero(rows) == len(rows) else rows


def _read(turns: Turns, output: Output, fates: _Fates) -> Tokens:
    """Return the step's tokens, and append the log-probabilities of scored prompt tokens to their requests."""
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
    """Return a copy of those parts of an output that the host reads. The next launch will overwrite the original.

    The copy has only those rows of the logits for which top log-probabilities are reported.
    """
    rows = len(turns.top)
    return replace(
        output,
        tokens=output.tokens[:rows].copy(),
        logprobs=output.logprobs[:rows].copy(),
        logits=output.logits[turns.read],
    )
