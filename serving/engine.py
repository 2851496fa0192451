"""Continuous batching: requests wait, run a chunk per step, and leave; one launch per step.

A step takes one token of every sequence that decodes, then fills what is left of its token budget with pieces of
prompts, in order of arrival. While a launch runs, the next step is planned and its table built: a token that the launch
is about to sample stands there as "what HISTORY will hold", so only a sequence that a stop token ends unforeseen
takes part once too often, and its row is ignored.

Sequences hold pages for the tokens they have. Where a running one needs a page and none is free, the youngest gives
up its own and waits again with the tokens it has generated; what it computes again has the same bits. A token's bits
depend on its own sequence only, so nothing of this shows in what is generated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims, StepTable
from ..program import Program
from ..runtime import build_step
from ..runtime.backend import Backend, Launch, Output
from ..runtime.step import Chunk, SampleRow
from .logprobs import top_logprobs
from .pages import PagePool
from .programs import Programs
from .request import Request, Sequence
from .sampling import SamplingParams

SCORED_ROWS = 64  # logit rows that prompt scoring may fill; each holds a whole vocabulary


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


@dataclass(frozen=True)
class Stats:
    """The engine now, and what it has counted since it was made."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    preemptions: int
    prefix_queries: int  # tokens of admitted sequences that may use the prefix cache
    prefix_hits: int  # those of them that it held


class _Sample(NamedTuple):
    """A logit row of a step."""

    sequence: Sequence
    target: int  # prompt token to score; -1: sample
    top: int  # most likely tokens to report besides this one; -1: none at all


@dataclass
class _Work:
    """A step ready to start; once it has, `launch` is what runs."""

    program: Program
    table: StepTable
    chunks: list[Chunk]
    sequences: list[Sequence]
    samples: list[_Sample]
    histories: list[tuple[int, NDArray[np.int32]]]  # slots that change hands, and what they hold then
    launch: Launch | None = None


class Engine:
    """Runs requests on a backend. Not thread-safe: one caller adds, steps and aborts.

    `pages` is the size of the backend's KV pool and `step_tokens` the token budget of a step; the other limits are
    those of `dims`. With `prefix_cache`, prompts that begin alike share pages. Token ids go in and come out;
    `Transcript` makes text of them.
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
    ) -> None:
        self.backend = backend
        self.programs = programs
        self.dims = dims
        self._step_tokens, self._eos_ids, self._prefix_cache = step_tokens, eos_ids, prefix_cache
        self._pool = PagePool(pages)
        self._slots = list(range(dims.max_seqs - 1, -1, -1))
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}
        self._under_way: _Work | None = None
        self._histories: list[tuple[int, NDArray[np.int32]]] = []
        self._requests = self._preemptions = self._prefix_queries = self._prefix_hits = 0

    # -- requests

    @property
    def idle(self) -> bool:
        """Nobody waits or runs; then no launch is under way either."""
        return not self._waiting and not self._running

    @property
    def stats(self) -> Stats:
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages=self._pool.pages,
            pages_used=self._pool.pages - self._pool.free,
            preemptions=self._preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def add(self, prompt_ids: Seq[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises MegakernelError where it can never run."""
        prompt = self.check(prompt_ids, params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        request = Request(self._requests, prompt, params, stop_ids)
        self._requests += 1
        limit = self._length_limit(len(prompt), params)
        request.choices = [Sequence(request, choice, list(prompt), limit) for choice in range(params.n)]
        now = len(request.choices) if len(prompt) <= self.dims.page else 1  # nothing to share: all at once
        self._waiting.update(dict.fromkeys(request.choices[:now]))
        request.held = request.choices[now:]
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
        needed = self._pages_for(self._length_limit(len(prompt), params) - 1)
        if needed > self._pool.pages:
            raise MegakernelError(
                f"prompt and max_tokens need {needed} KV pages and the pool has {self._pool.pages}: lower max_tokens"
            )
        return prompt

    def abort(self, request: Request) -> None:
        """Forget a request; its choices that run end with reason `abort`."""
        for sequence in request.choices:
            self._finish(sequence, "abort")
        self._settle()

    def stop(self, request: Request, choice: int) -> None:
        """End one choice where its reader found a stop string."""
        self._finish(request.choices[choice], "stop")
        self._settle()

    def reset_prefix_cache(self) -> None:
        """Requests admitted from now on compute their prompts themselves."""
        self._pool.forget()

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
            if work is None or work.launch is None:
                raise AssertionError("a step without work")
            ahead = self._prepare()
            output = _own(work.launch.wait(), work.samples)
            self._under_way = None
            fresh = self._advance(work, output)
            self._start(ahead, trace)
        except BaseException:
            self._reset()
            raise
        return Step(work.program, work.chunks, output, self._read(work, output, fresh))

    def run(self) -> Iterator[Step]:
        """Step until nothing is left."""
        while not self.idle:
            yield self.step()

    def close(self) -> None:
        """Abort what runs and free the backend."""
        self._reset()
        self.backend.close()

    def _prepare(self) -> _Work | None:
        """Plan and build the step after the launches so far; None where nobody can take part."""
        for sequence in self._running:
            self._publish(sequence)
        self._grow()
        self._admit()
        chunks: list[Chunk] = []
        samples: list[_Sample] = []
        plan = self._plan()
        for sequence, count in plan:
            chunks.append(self._chunk(sequence, count, samples))
        histories, self._histories = self._histories, []
        if not plan:
            return None
        program = self.programs.get(sum(count for _, count in plan), max(len(samples), 1))
        table = build_step(program.dims, chunks)
        return _Work(program, table, chunks, [sequence for sequence, _ in plan], samples, histories)

    def _start(self, work: _Work | None, trace: bool) -> None:
        """Launch a step, unless everybody in it has ended meanwhile."""
        if work is None:
            return
        for slot, tokens in work.histories:
            self.backend.write_history(slot, 0, tokens)
        if all(sequence.finish_reason for sequence in work.sequences):
            return
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
        for sequence in sorted(self._running, key=_age, reverse=True):
            self._preempt(sequence)
        for sequence in self._waiting:
            sequence.length = len(sequence.tokens)
            sequence.request.scored = len(sequence.request.prompt_logprobs)
        self._histories.clear()
        self._pool.forget()

    # -- planning

    def _length_limit(self, prompt: int, params: SamplingParams) -> int:
        context = self.dims.max_context
        return context if params.max_tokens is None else min(context, prompt + params.max_tokens)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.dims.page)

    def _publish(self, sequence: Sequence) -> None:
        """Let others share the pages that the launches so far fill.

        Not the page that the last token ends: a sequence that ends with it may have been planned for a step that
        never starts.
        """
        page = self.dims.page
        full = min(sequence.computed, len(sequence.tokens) - 1) // page
        if full > sequence.known_pages:
            hashes = sequence.page_hashes(page, full)
            for i in range(sequence.known_pages, full):
                self._pool.learn(hashes[i], sequence.pages[i])
            sequence.known_pages = full

    def _grow(self) -> None:
        """Give every running sequence room for its next token, the oldest first and, if need be, at the youngest's
        expense. Who lost its pages cannot be admitted in the same plan: it needs more than it gave up.
        """
        page = self.dims.page
        short = [s for s in self._running if s.pending and len(s.pages) * page < s.length]
        if len(short) > self._pool.free:
            short.sort(key=_age)
        for sequence in short:
            while not self._pool.free and sequence.slot >= 0:
                self._preempt(max(self._running, key=_age))
                self._preemptions += 1
            if sequence.slot >= 0:
                sequence.pages += self._pool.take(1)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, with the tokens it has."""
        self._release(sequence)
        self._push(sequence)

    def _admit(self) -> None:
        """Let those who wait run while there is a slot and room for the tokens they have, in order.

        Room is what is free less a page for each running sequence that will need one.
        """
        if not self._waiting or not self._slots:
            return
        page = self.dims.page
        spare = self._pool.free - sum(len(s.pages) * page < s.length_limit - 1 for s in self._running)
        while self._waiting and self._slots:
            sequence = next(iter(self._waiting))
            shared = self._prefix(sequence)
            own = self._pages_for(sequence.length) - len(shared)
            taken = own + self._pool.unused(shared)
            if taken > (spare if self._running else self._pool.free):
                return
            del self._waiting[sequence]
            self._pool.share(shared)
            sequence.slot, sequence.pages = self._slots.pop(), shared + self._pool.take(own)
            sequence.computed, sequence.known_pages = len(shared) * page, len(shared)
            self._running[sequence] = None
            self._count_prefix(sequence)
            self._histories.append((sequence.slot, np.array(sequence.tokens, dtype=np.int32)))
            spare -= taken + (len(sequence.pages) * page < sequence.length_limit - 1)

    def _count_prefix(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.cached_tokens is None:
            request.cached_tokens = sequence.computed
        if not request.scores_prompt(sequence.choice):
            self._prefix_queries += len(sequence.tokens)
            self._prefix_hits += sequence.computed

    def _prefix(self, sequence: Sequence) -> list[int]:
        """Known pages that hold the sequence's beginning, but never its last token, whose logits are wanted.

        A prompt that is scored needs the logits of all of it.
        """
        request = sequence.request
        if request.scores_prompt(sequence.choice) or not self._prefix_cache:
            return []
        page = self.dims.page
        return self._pool.find(sequence.page_hashes(page, (sequence.length - 1) // page))

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in the next step: decoding sequences first, then the oldest prompts."""
        tokens, rows = self._step_tokens, max(self.dims.max_seqs, SCORED_ROWS)
        plan: list[tuple[Sequence, int]] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            pending = sequence.pending
            if pending == 1 and tokens and rows:
                plan.append((sequence, 1))
                tokens, rows = tokens - 1, rows - 1
            elif pending:
                prompts.append(sequence)
        for sequence in prompts:
            count = min(sequence.pending, tokens)
            if self._scores(sequence):
                count = wanted = min(count, rows)
            elif count == sequence.pending and rows == 0:
                count, wanted = count - 1, 0
            else:
                wanted = int(count == sequence.pending)
            if count:
                plan.append((sequence, count))
                tokens, rows = tokens - count, rows - wanted
        return plan

    def _scores(self, sequence: Sequence) -> bool:
        request = sequence.request
        return request.scores_prompt(sequence.choice) and request.scored < len(request.prompt_ids) - 1

    def _chunk(self, sequence: Sequence, count: int, samples: list[_Sample]) -> Chunk:
        """Schedule the next `count` tokens of a sequence; its logit rows join `samples`."""
        request, start, end = sequence.request, sequence.computed, sequence.computed + count
        rows: list[SampleRow] = []
        if self._scores(sequence):
            prompt, top = request.prompt_ids, request.params.prompt_logprobs or 0
            first, last = max(start, request.scored), min(end, len(prompt) - 1)
            for position in range(first, last):
                rows.append(SampleRow(index=position - start, target=prompt[position + 1], store=False))
                samples.append(_Sample(sequence, prompt[position + 1], top))
            request.scored = max(last, request.scored)
        ids = sequence.tokens[start:end]
        if len(ids) < count:
            ids.append(-1)  # the token that the launch under way samples, from HISTORY
        if end == sequence.length:
            rows.append(sequence.sample_row(count - 1))
            wanted = request.params.logprobs
            samples.append(_Sample(sequence, -1, -1 if wanted is None else wanted))
            sequence.length += 1
        sequence.computed = end
        if request.held and sequence.choice == 0 and end >= len(request.prompt_ids):
            self._unhold(request)
        return Chunk(sequence.slot, start, ids, sequence.pages, rows)

    # -- outcomes

    def _advance(self, work: _Work, output: Output) -> list[bool]:
        """Append the sampled tokens and end the sequences that end with them. False: a row of one that had ended."""
        now = perf_counter()
        live = [sample.sequence.finish_reason is None for sample in work.samples]
        for sample, token, alive in zip(work.samples, output.tokens.tolist(), live, strict=True):
            if sample.target >= 0 or not alive:
                continue
            sequence = sample.sequence
            sequence.tokens.append(token)
            sequence.first_token_at = sequence.first_token_at or now
            sequence.last_token_at = now
            if token in sequence.request.stop_ids:
                self._finish(sequence, "stop")
            elif len(sequence.tokens) >= sequence.length_limit:
                self._finish(sequence, "length")
        return live

    def _read(self, work: _Work, output: Output, live: list[bool]) -> list[Token]:
        """The step's tokens, and the scores of prompts to their requests."""
        found: list[Token] = []
        logits = iter(output.logits)
        rows = zip(work.samples, live, output.tokens.tolist(), output.logprobs.tolist(), strict=True)
        for (sequence, target, top), alive, token, logprob in rows:
            best = top_logprobs(next(logits), top, token, logprob) if top > 0 else {}
            if not alive:
                continue
            if top >= 0:
                best[token] = logprob
            if target < 0:
                found.append(Token(sequence.request, sequence.choice, token, logprob, best, sequence.finish_reason))
            else:
                sequence.request.prompt_logprobs.append(logprob)
                sequence.request.prompt_top_logprobs.append(best)
        return found

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, wherever it is; again: nothing."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self._publish(sequence)
            self._release(sequence)
        else:
            self._waiting.pop(sequence, None)
        if sequence.choice == 0:
            self._unhold(sequence.request)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._pool.give(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []

    def _unhold(self, request: Request) -> None:
        """The first choice has computed the prompt (or ended): the others come next."""
        for sequence in reversed(request.held):
            self._push(sequence)
        request.held = []

    def _push(self, sequence: Sequence) -> None:
        """To the head of the queue."""
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)


def _age(sequence: Sequence) -> tuple[int, int]:
    """Order of arrival."""
    return sequence.request.id, sequence.choice


def _own(output: Output, samples: Seq[_Sample]) -> Output:
    """A copy of what the host reads of an output, before the next launch overwrites it: the logits of `top` rows."""
    rows = len(samples)
    read = [row for row, sample in enumerate(samples) if sample.top > 0]
    return replace(
        output, tokens=output.tokens[:rows].copy(), logprobs=output.logprobs[:rows].copy(), logits=output.logits[read]
    )
