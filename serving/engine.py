"""Continuous batching: requests wait, run a chunk per step, and leave; one launch per step.

A step takes one token of every sequence that decodes, then fills what is left of its token budget with pieces of
prompts, in order of arrival. A sequence is admitted when a slot and every page that it may ever need are free, so a
running sequence never waits for memory. A token's bits depend on its own sequence only, so none of this shows in
what is generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ..errors import MegakernelError
from ..isa import Dims
from ..program import Program
from ..runtime import build_step
from ..runtime.backend import Backend, Output
from ..runtime.step import Chunk, SampleRow
from .logprobs import top_logprobs
from .pages import PagePool
from .programs import Programs
from .request import Request, Sequence
from .sampling import SamplingParams
from .text import Decoder, TextStream

SCORED_ROWS = 64  # logit rows that prompt scoring may fill; each holds a whole vocabulary


@dataclass(frozen=True)
class Token:
    """One generated token, as it appears. `text` is what became certain with it."""

    request: Request
    choice: int
    token_id: int
    logprob: float
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Step:
    """One launch. `chunks` tell what it computed; `output` holds until the next launch."""

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


class Engine:
    """Runs requests on a backend. Not thread-safe: one caller adds, steps and aborts.

    `pages` is the size of the backend's KV pool and `step_tokens` the token budget of a step; the other limits are
    those of `dims`. `decoder` makes an incremental detokeniser, None where there is no tokenizer.
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
        decoder: Callable[[], Decoder] | None,
    ) -> None:
        self.backend = backend
        self.dims = dims
        self._programs = programs
        self._total_pages, self._step_tokens = pages, step_tokens
        self._eos_ids, self._decoder = eos_ids, decoder
        self._pool = PagePool(pages)
        self._slots = list(range(dims.max_seqs - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._requests = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, prompt_ids: Seq[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises MegakernelError where it can never run."""
        prompt = self.check(prompt_ids, params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        request = Request(self._requests, prompt, params, stop_ids)
        self._requests += 1
        limit = self._length_limit(len(prompt), params)
        for choice in range(params.n):
            stream = TextStream(self._decoder(), params.stop_strings) if self._decoder else None
            request.choices.append(Sequence(request, choice, list(prompt), limit, stream))
        self._waiting.extend(request.choices)
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
        if params.stop_strings and self._decoder is None:
            raise MegakernelError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        needed = self._pages_for(self._length_limit(len(prompt), params))
        if needed > self._total_pages:
            raise MegakernelError(
                f"prompt and max_tokens need {needed} KV pages and the pool has {self._total_pages}: lower max_tokens"
            )
        return prompt

    def abort(self, request: Request) -> None:
        """Forget a request; its choices that run end with reason `abort`."""
        for sequence in request.choices:
            if sequence.finish_reason is None:
                if sequence.slot >= 0:
                    self._release(sequence)
                else:
                    self._waiting.remove(sequence)
                sequence.finish_reason = "abort"

    def step(self, *, trace: bool = False) -> Step:
        """Run one step; there must be work."""
        self._admit()
        plan = self._plan()
        chunks = [self._chunk(sequence, count) for sequence, count in plan]
        samples = sum(len(chunk.samples) for chunk in chunks)
        program = self._programs.get(sum(count for _, count in plan), max(samples, 1))
        output = self.backend.launch(program, build_step(program.dims, chunks), trace=trace)
        now = perf_counter()
        tokens: list[Token] = []
        row = 0
        for (sequence, count), chunk in zip(plan, chunks, strict=True):
            sequence.computed += count
            for sample in chunk.samples:
                if sample.target >= 0:
                    self._score(sequence.request, output, row)
                else:
                    tokens.append(self._accept(sequence, output, row, now))
                row += 1
        return Step(program, chunks, output, tokens)

    def run(self) -> Iterator[Step]:
        """Step until nothing is left."""
        while not self.idle:
            yield self.step()

    def _length_limit(self, prompt: int, params: SamplingParams) -> int:
        context = self.dims.max_context
        return context if params.max_tokens is None else min(context, prompt + params.max_tokens)

    def _pages_for(self, length: int) -> int:
        """Pages for `length` tokens; the last one generated is never fed back, so it needs no room."""
        return -(-(length - 1) // self.dims.page)

    def _admit(self) -> None:
        while self._waiting and self._slots:
            sequence = self._waiting[0]
            needed = self._pages_for(sequence.length_limit)
            if needed > self._pool.free:
                return
            self._waiting.popleft()
            sequence.slot, sequence.pages = self._slots.pop(), self._pool.take(needed)
            self._running.append(sequence)
            self.backend.write_history(sequence.slot, 0, np.array(sequence.tokens, dtype=np.int32))

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in the next step: decoding sequences first, then the oldest prompts."""
        tokens, rows = self._step_tokens, max(self.dims.max_seqs, SCORED_ROWS)
        plan: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running, key=lambda s: s.pending > 1):
            count = min(sequence.pending, tokens)
            if sequence.request.scores_prompt(sequence.choice) and not sequence.outputs:
                count = wanted = min(count, rows)
            elif count == sequence.pending and rows == 0:
                count, wanted = count - 1, 0
            else:
                wanted = int(count == sequence.pending)
            if count:
                plan.append((sequence, count))
                tokens, rows = tokens - count, rows - wanted
        return plan

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start, end = sequence.computed, sequence.computed + count
        prompt = sequence.request.prompt_ids
        samples: list[SampleRow] = []
        if sequence.request.scores_prompt(sequence.choice):
            for position in range(start, min(end, len(prompt) - 1)):
                samples.append(SampleRow(index=position - start, target=prompt[position + 1], store=False))
        if end == len(sequence.tokens):
            samples.append(sequence.sample_row(count - 1))
        # A generated token is read where the program left it, so a step need not know the last one's outcome.
        ids = [-1] if sequence.outputs else sequence.tokens[start:end]
        return Chunk(sequence.slot, start, ids, sequence.pages, samples)

    def _score(self, request: Request, output: Output, row: int) -> None:
        count = request.params.prompt_logprobs or 0
        token, logprob = int(output.tokens[row]), float(output.logprobs[row])
        request.prompt_logprobs.append(logprob)
        request.prompt_top_logprobs.append(top_logprobs(output.logits[row], count) | {token: logprob})

    def _accept(self, sequence: Sequence, output: Output, row: int, now: float) -> Token:
        """Append the sampled token, and end the sequence where it must end."""
        params = sequence.request.params
        token, logprob = int(output.tokens[row]), float(output.logprobs[row])
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if params.logprobs is not None:
            sequence.top_logprobs.append(top_logprobs(output.logits[row], params.logprobs) | {token: logprob})
        sequence.first_token_at = sequence.first_token_at or now
        sequence.last_token_at = now
        stopped = token in sequence.request.stop_ids
        stream, search = sequence.stream, sequence.outputs >= params.min_tokens
        if stream and not stopped:
            stream.add(token, search)
            stopped = stream.stopped
        if stopped or len(sequence.tokens) >= sequence.length_limit:
            if stream:
                stream.finish(search)
                stopped = stopped or stream.stopped
            self._release(sequence)
            sequence.finish_reason = "stop" if stopped else "length"
        text = stream.take(final=sequence.finish_reason is not None) if stream else ""
        return Token(sequence.request, sequence.choice, token, logprob, text, sequence.finish_reason)

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.give(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []
