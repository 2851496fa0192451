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
from typing import NamedTuple

from ..errors import MegakernelError
from ..isa import Dims
from ..program import Program
from ..runtime.backend import Backend, Output
from ..runtime.step import Chunk, SampleRow, Steps
from .batch import Batch, Stats
from .counts import Counts
from .logprobs import top_logprobs
from .programs import Programs
from .request import Request, Sequence
from .sampling import SamplingParams
from .speculation import Speculation
from .work import Sample, Turn, Work


class Token(NamedTuple):
    """One generated token. `top_logprobs` has the most likely ids and this one where the request asks, else nothing."""

    request: Request
    choice: int
    token_id: int
    logprob: float
    top_logprobs: dict[int, float]
    finish_reason: str | None


@dataclass(frozen=True)
class Step:
    """One launch that has ended. `chunks` tell what it computed; of `output`, the logits are not kept."""

    program: Program
    chunks: Seq[Chunk]
    output: Output
    tokens: Seq[Token]

    @property
    def rows(self) -> list[int]:
        """New tokens of each sequence."""
        return [len(chunk.tokens) for chunk in self.chunks]

    @property
    def contexts(self) -> list[int]:
        """KV tokens of each sequence after the step."""
        return [chunk.start + len(chunk.tokens) for chunk in self.chunks]

    @property
    def logit_rows(self) -> int:
        return sum(len(chunk.samples) for chunk in self.chunks)


class _Fate(NamedTuple):
    """What became of a logit row. `counts` is False for one of a sequence that had ended or had other tokens."""

    counts: bool
    finish_reason: str | None = None  # where the row's token ends its sequence


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
        self._steps = Steps()
        self._under_way: Work | None = None
        self._requests = 0

    # -- requests

    @property
    def idle(self) -> bool:
        """Nobody waits or runs; then no launch is under way either."""
        return not self._batch.waiting and not self._batch.running

    @property
    def stats(self) -> Stats:
        return self._batch.stats

    def add(self, prompt_ids: Seq[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises MegakernelError where it can never run."""
        prompt = self.check(prompt_ids, params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        request = Request(self._requests, prompt, params, stop_ids)
        self._requests += 1
        limit = self._length_limit(len(prompt), params)
        request.choices = [Sequence(request, choice, list(prompt), limit) for choice in range(params.n)]
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
                ahead.build(self.programs, self._steps)
            output = _own(work.launch.wait(), work.samples)
            self._under_way = None
            ended = perf_counter()
            fates = self._advance(work, output, ended)
            self._start(self._prepare() if late else ahead, trace)
            if self._speculation:
                self._speculation.times.record(work.program, output.seconds)
                if late:
                    self._speculation.times.record_late(perf_counter() - ended)
        except BaseException:
            self._reset()
            raise
        chunks = [turn.chunk for turn in work.turns]
        return Step(work.program, chunks, output, self._read(work, output, fates))

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
        turns = [self._turn(sequence, count) for sequence, count in self._batch.plan()]
        if not turns:
            return None
        work = Work(turns, self._batch.take_histories())
        if self._speculation:
            self._speculation.read(work)
        return work

    def _start(self, work: Work | None, trace: bool) -> None:
        """Launch a step, unless everybody in it has ended meanwhile."""
        if work is None:
            return
        extended = self._speculation and self._speculation.extend(
            work, self._batch, tokens=self._step_tokens, logit_rows=self.programs.most_logit_rows
        )
        for slot, start, tokens in work.histories:
            self.backend.write_history(slot, start, tokens)
        if work.ended:
            return
        if extended or work.table is None:
            work.build(self.programs, self._steps)
        assert work.program is not None and work.table is not None
        work.launch = self.backend.start(work.program, work.table, trace=trace)
        self._under_way = work

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
        if work and work.launch:
            work.launch.abort()
        self._batch.reset()

    # -- planning

    def _length_limit(self, prompt: int, params: SamplingParams) -> int:
        context = self.dims.max_context
        return context if params.max_tokens is None else min(context, prompt + params.max_tokens)

    def _turn(self, sequence: Sequence, count: int) -> Turn:
        """Schedule the next `count` tokens of a sequence, with the logit rows that they need."""
        request, start, end = sequence.request, sequence.computed, sequence.computed + count
        rows: list[SampleRow] = []
        samples: list[Sample] = []
        if sequence.scoring:
            prompt, top = request.prompt_ids, request.params.prompt_logprobs or 0
            first, last = max(start, request.scored), min(end, len(prompt) - 1)
            for position in range(first, last):
                rows.append(SampleRow(index=position - start, target=prompt[position + 1], store=False))
                samples.append(Sample(sequence, position + 1, prompt[position + 1], top))
            request.scored = max(last, request.scored)
        ids = sequence.tokens[start:end]
        if len(ids) < count:
            ids.append(-1)  # the token that the launch under way samples, from HISTORY
        if end == sequence.length:
            rows.append(sequence.sample_row(count - 1, start))
            wanted = request.params.logprobs
            samples.append(Sample(sequence, end, -1, -1 if wanted is None else wanted))
            sequence.length += 1
        sequence.computed = end
        if request.held and sequence.choice == 0 and end >= len(request.prompt_ids):
            self._batch.unhold(request)
        return Turn(sequence, Chunk(sequence.slot, start, ids, sequence.pages, rows), samples)

    # -- outcomes

    def _advance(self, work: Work, output: Output, now: float) -> list[_Fate]:
        """Append the sampled tokens and end the sequences that end with them: what became of each logit row."""
        tokens = iter(output.tokens.tolist())
        fates: list[_Fate] = []
        generated = turns = proposed = accepted = 0
        for turn in work.turns:
            mine = [self._take(sample, token, now) for sample, token in zip(turn.samples, tokens, strict=False)]
            made = sum(fate.counts for fate, sample in zip(mine, turn.samples, strict=True) if sample.target < 0)
            generated, turns = generated + made, turns + (made > 0)
            if made and turn.proposed:
                proposed, accepted = proposed + turn.proposed, accepted + made - 1
                self._verified(turn, made - 1)
            fates += mine
        self._batch.counts += Counts(generated, turns, proposed, accepted)
        return fates

    def _take(self, sample: Sample, token: int, now: float) -> _Fate:
        """The sampled token of a logit row joins its sequence, if that is what the row was computed for."""
        sequence = sample.sequence
        if sequence.finish_reason is not None:
            return _Fate(False)
        if sample.target >= 0:
            return _Fate(True)
        known = sequence.tokens
        if sample.after >= 0 and (len(known) != sample.position or known[-1] != sample.after):
            return _Fate(False)  # a token proposed before it was wrong
        known.append(token)
        sequence.first_token_at = sequence.first_token_at or now
        sequence.last_token_at = now
        if token in sequence.request.stop_ids:
            self._batch.finish(sequence, "stop")
        elif len(known) >= sequence.length_limit:
            self._batch.finish(sequence, "length")
        return _Fate(True, sequence.finish_reason)

    def _verified(self, turn: Turn, accepted: int) -> None:
        """So many of a turn's proposed tokens were right."""
        assert self._speculation is not None
        self._speculation.learn(turn, accepted)
        if turn.sequence.finish_reason is None:
            self._batch.shorten(turn.sequence)

    def _read(self, work: Work, output: Output, fates: Seq[_Fate]) -> list[Token]:
        """The step's tokens, and the scores of prompts to their requests."""
        found: list[Token] = []
        logits = iter(output.logits)
        rows = zip(work.samples, fates, output.tokens.tolist(), output.logprobs.tolist(), strict=True)
        for sample, fate, token, logprob in rows:
            sequence, top = sample.sequence, sample.top
            row = next(logits) if top > 0 else None
            if not fate.counts:
                continue
            best = {} if row is None else top_logprobs(row, top, token, logprob)
            if top >= 0:
                best[token] = logprob
            if sample.target < 0:
                found.append(Token(sequence.request, sequence.choice, token, logprob, best, fate.finish_reason))
            else:
                sequence.request.prompt_logprobs.append(logprob)
                sequence.request.prompt_top_logprobs.append(best)
        return found


def _own(output: Output, samples: Seq[Sample]) -> Output:
    """A copy of what the host reads of an output, before the next launch overwrites it: the logits of `top` rows."""
    rows = len(samples)
    read = [row for row, sample in enumerate(samples) if sample.top > 0]
    return replace(
        output, tokens=output.tokens[:rows].copy(), logprobs=output.logprobs[:rows].copy(), logits=output.logits[read]
    )
