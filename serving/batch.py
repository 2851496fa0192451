"""Who waits and who runs, with which slot and pages, and how many tokens each computes in the next step.

Sequences hold pages for the tokens they have. Where a running one needs a page and none is free, the youngest gives
up its own and waits again with the tokens it has generated; what it computes again has the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import Dims
from .counts import Counts
from .pages import PagePool
from .request import Request, Sequence

SCORED_ROWS = 64  # logit rows that prompt scoring may fill; each holds a whole vocabulary


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
    counts: Counts


class Batch:
    """Sequences of `dims.max_seqs` slots on a pool of `pages` KV pages, at most `step_tokens` tokens a step."""

    def __init__(self, dims: Dims, *, pages: int, step_tokens: int, prefix_cache: bool) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: dict[Sequence, None] = {}
        self.counts = Counts()  # the engine's, who knows the outcome of steps
        self._max_seqs, self._page = dims.max_seqs, dims.kv_page
        self._step_tokens, self._prefix_cache = step_tokens, prefix_cache
        self._pool = PagePool(pages)
        self._slots = list(range(dims.max_seqs - 1, -1, -1))
        self._histories: list[tuple[int, int, NDArray[np.int32]]] = []
        self._preemptions = self._prefix_queries = self._prefix_hits = 0

    @property
    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages=self._pool.pages,
            pages_used=self._pool.pages - self._pool.free,
            preemptions=self._preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            counts=self.counts,
        )

    def add(self, request: Request) -> None:
        """Queue a request's choices; the others after the first where its prompt's pages may be shared."""
        now = len(request.choices) if len(request.prompt_ids) <= self._page else 1  # nothing to share: all at once
        self.waiting.update(dict.fromkeys(request.choices[:now]))
        request.held = request.choices[now:]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def plan(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in the next step, each with slot and pages for them."""
        for sequence in self.running:
            self._publish(sequence)
        self._grow()
        self._admit()
        return self._deal()

    def take_histories(self) -> list[tuple[int, int, NDArray[np.int32]]]:
        """What HISTORY is to hold when the step starts and no launch has stored: (slot, first place, tokens)."""
        histories, self._histories = self._histories, []
        return histories

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, wherever it is; again: nothing."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self._publish(sequence)
            self._release(sequence)
        else:
            self.waiting.pop(sequence, None)
        if sequence.choice == 0:
            self.unhold(sequence.request)

    def lengthen(self, sequence: Sequence, tokens: int) -> int:
        """Give a running sequence pages for the K and V of `tokens` tokens, as far as pages are free.

        Returns for how many of them it has room then.
        """
        missing = self.pages_for(tokens) - len(sequence.pages)
        sequence.pages += self._pool.take(max(0, min(missing, self._pool.free)))
        return min(tokens, len(sequence.pages) * self._page)

    def shorten(self, sequence: Sequence) -> None:
        """Forget what a step computed for a sequence after the tokens that it has: those were proposed in vain."""
        tokens = len(sequence.tokens)
        sequence.computed, sequence.length = tokens - 1, tokens
        kept = self.pages_for(tokens)
        self._pool.give(sequence.pages[kept:])
        del sequence.pages[kept:]
        if sequence.penalised:
            self._write_history(sequence, tokens - 1)

    def unhold(self, request: Request) -> None:
        """The first choice has computed the prompt (or ended): the others come next."""
        for sequence in reversed(request.held):
            self._push(sequence)
        request.held = []

    def reset(self) -> None:
        """Everybody waits again with the tokens they have, and no page is known."""
        for sequence in sorted(self.running, key=_age, reverse=True):
            self._preempt(sequence)
        for sequence in self.waiting:
            sequence.length = len(sequence.tokens)
            sequence.request.scored = len(sequence.request.prompt_logprobs)
        self._histories.clear()
        self.forget()

    def forget(self) -> None:
        """Sequences admitted from now on compute their prompts themselves."""
        self._pool.forget()

    def _publish(self, sequence: Sequence) -> None:
        """Let others share the pages that the launches so far fill.

        Not the page that the last token ends: a sequence that ends with it may have been planned for a step that
        never starts.
        """
        page = self._page
        full = min(sequence.computed, len(sequence.tokens) - 1) // page
        if full > sequence.known_pages:
            hashes = sequence.page_hashes(page, full)
            for i in range(sequence.known_pages, full):
                self._pool.learn(hashes[i], sequence.pages[i])
            sequence.known_pages = full

    def _grow(self) -> None:
        """Give every running sequence room for its next token, the oldest first and, if need be, at the youngest's
        expense.
        """
        page = self._page
        short = [s for s in self.running if s.pending and len(s.pages) * page < s.length]
        if len(short) > self._pool.free:
            short.sort(key=_age)
        for sequence in short:
            while not self._pool.free and sequence.slot >= 0:
                self._preempt(max(self.running, key=_age))
                self._preemptions += 1
            if sequence.slot >= 0:
                sequence.pages += self._pool.take(1)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, with the tokens it has."""
        self._release(sequence)
        self._push(sequence)

    def _admit(self) -> None:
        """Let those who wait run while there is a slot and room for the tokens they have, in order.

        Room is what is free less a page for each running sequence that will need one. Who has just lost its pages waits
        for the token that is being sampled for it: that goes to the slot that it had.
        """
        if not self.waiting or not self._slots:
            return
        page = self._page
        spare = self._pool.free - sum(len(s.pages) * page < s.length_limit - 1 for s in self.running)
        while self.waiting and self._slots:
            sequence = next(iter(self.waiting))
            if sequence.length > len(sequence.tokens):
                return
            shared = self._prefix(sequence)
            own = self.pages_for(sequence.length) - len(shared)
            taken = own + self._pool.unused(shared)
            if taken > (spare if self.running else self._pool.free):
                return
            del self.waiting[sequence]
            self._pool.share(shared)
            sequence.slot, sequence.pages = self._slots.pop(), shared + self._pool.take(own)
            sequence.computed, sequence.known_pages = len(shared) * page, len(shared)
            self.running[sequence] = None
            self._count_prefix(sequence)
            self._write_history(sequence, 0)
            spare -= taken + (len(sequence.pages) * page < sequence.length_limit - 1)

    def _write_history(self, sequence: Sequence, start: int) -> None:
        self._histories.append((sequence.slot, start, np.array(sequence.tokens[start:], dtype=np.int32)))

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
        page = self._page
        return self._pool.find(sequence.page_hashes(page, (sequence.length - 1) // page))

    def _deal(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in the next step: decoding sequences first, then the oldest prompts."""
        tokens, rows = self._step_tokens, max(self._max_seqs, SCORED_ROWS)
        plan: list[tuple[Sequence, int]] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            pending = sequence.pending
            if pending == 1 and tokens and rows:
                plan.append((sequence, 1))
                tokens, rows = tokens - 1, rows - 1
            elif pending:
                prompts.append(sequence)
        for sequence in prompts:
            count = min(sequence.pending, tokens)
            if sequence.scoring:
                count = wanted = min(count, rows)
            elif count == sequence.pending and rows == 0:
                count, wanted = count - 1, 0
            else:
                wanted = int(count == sequence.pending)
            if count:
                plan.append((sequence, count))
                tokens, rows = tokens - count, rows - wanted
        return plan

    def _release(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._pool.give(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []

    def _push(self, sequence: Sequence) -> None:
        """To the head of the queue."""
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)


def _age(sequence: Sequence) -> tuple[int, int]:
    """Order of arrival."""
    return sequence.request.id, sequence.choice
