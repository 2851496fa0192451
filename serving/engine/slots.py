"""The state of the running sequences as arrays: one array per attribute, one element per slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dims
from megakernel.runtime.sampling import Ints, Sampling
from megakernel.runtime.steps import Pages
from megakernel.serving.engine.request import Sequence

Objects = NDArray[np.object_]


class Slots:
    """Arrays with the state of the running sequences. `order` lists their slots in order of admission.

    Steps are planned before earlier steps have ended. So `length` also counts tokens that planned steps have yet to
    sample, and `computed` counts tokens whose K and V will be in the pages once all planned steps have run.
    """

    def __init__(self, dims: Dims) -> None:
        n = dims.max_seqs
        self.page = dims.kv_page
        self.order: Ints = np.zeros(0, np.int64)  # a new array after each change, so that `is` shows whether it changed
        self.sequence: Objects = np.full(n, None)
        self.ticket = np.full(n, -1)  # number of the sequence's admission; -1: the slot is free
        self.tag, self.choice = np.zeros((2, n), np.int64)
        self.tokens = np.zeros((n, dims.max_context), np.int32)
        self.known, self.length, self.computed, self.known_pages = np.zeros((4, n), np.int64)
        self.limit, self.prompt, self.early_until = np.zeros((3, n), np.int64)
        self.stop_ids = np.full((n, 1), -1)  # stop ids of each sequence, padded with -1
        self.top = np.full(n, -1)  # how many top log-probabilities to report; -1: report none
        self.holds = np.zeros(n, np.bool_)  # whether other choices wait until this one has computed the prompt
        self.constrained = np.zeros(n, np.bool_)  # whether the sequence has a `Constraint`, such as a grammar
        self.first_token_at, self.last_token_at = np.zeros((2, n))
        self.pages = Pages(dims)
        self.sampling = Sampling(2 * n + 1)  # a row per slot, then a row per slot for use before min_tokens
        self._tickets = 0

    def seat(self, slot: int, sequence: Sequence, pages: list[int], shared: int) -> None:
        """Put a sequence into `slot` with `pages`. The first `shared` pages already hold its first tokens."""
        request, tokens = sequence.request, sequence.tokens
        stop, logprobs = sorted(request.stop_ids), request.params.logprobs
        if (more := len(stop) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[slot], self.stop_ids[slot, : len(stop)] = -1, stop
        self.sequence[slot], self.tag[slot], self.choice[slot] = sequence, request.tag, sequence.choice
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = self.length[slot] = len(tokens)
        self.computed[slot], self.known_pages[slot] = shared * self.page, shared
        self.limit[slot], self.prompt[slot] = sequence.length_limit, len(request.prompt_ids)
        self.early_until[slot] = len(request.prompt_ids) + request.params.min_tokens
        self.top[slot] = -1 if logprobs is None else logprobs
        self.holds[slot] = sequence.choice == 0 and bool(request.held)
        self.constrained[slot] = sequence.constraint is not None
        self.first_token_at[slot] = sequence.first_token_at
        self.last_token_at[slot] = sequence.last_token_at or request.added_at
        self.sampling.set(slot, sequence.sample_row(early=False))
        if request.params.min_tokens:
            self.sampling.set(slot + len(self.ticket), sequence.sample_row(early=True))
        self.set_pages(slot, 0, pages)
        sequence.slot, self.ticket[slot] = slot, self._tickets
        self._tickets += 1
        self.order = np.append(self.order, slot)

    def leave(self, sequence: Sequence) -> list[int]:
        """Remove a sequence from its slot, save its tokens, and return its pages."""
        slot, pages, _ = sequence.slot, sequence.pages, sequence.tokens
        sequence.first_token_at = float(self.first_token_at[slot])
        sequence.last_token_at = float(self.last_token_at[slot]) if sequence.first_token_at else 0.0
        sequence.slot, self.ticket[slot], self.sequence[slot], self.constrained[slot] = -1, -1, None, False
        self.order = self.order[self.order != slot]
        return pages

    def pages_of(self, slot: int) -> list[int]:
        return self.pages.ids[slot, : self.pages.count[slot]].tolist()  # type: ignore[no-any-return]

    def set_pages(self, slot: int, kept: int, more: list[int]) -> None:
        """Keep the first `kept` pages of a slot's sequence, and append the pages `more` to them."""
        self.pages.count[slot] = count = kept + len(more)
        self.pages.ids[slot, kept:count] = more
        self.pages.changed[:, slot] = True

    def add_page(self, slots: Ints, pages: list[int]) -> None:
        """Append one page to each of `slots`."""
        self.pages.ids[slots, self.pages.count[slots]] = pages
        self.pages.count[slots] += 1
        self.pages.changed[:, slots] = True

    def pending(self, slots: Ints) -> Ints:
        """Return, for each slot, how many of its tokens no planned step computes yet.

        The number is 0 for a sequence that has reached its length limit.
        """
        length = self.length[slots]
        return np.where(length < self.limit[slots], length - self.computed[slots], 0)

    def crowded(self, slots: Ints) -> NDArray[np.bool_]:
        """Return for each slot whether its sequence has too few pages for `length` tokens."""
        return self.pages.count[slots] * self.page < self.length[slots]

    def place(self, slots: Ints, position: Ints) -> Ints:
        """Return the index of the row of `sampling` that applies to each slot's token at `position`.

        Each slot has a separate row for the tokens before min_tokens is reached.
        """
        early = position < self.early_until[slots]
        return slots + len(self.ticket) * early if np.count_nonzero(early) else slots

    def place_of(self, slot: int, position: int) -> int:
        """`place` for one token."""
        return slot + len(self.ticket) * bool(position < self.early_until[slot])

    def full_pages(self, slots: Ints) -> Ints:
        """Return, for each slot, how many pages the launches so far have filled.

        A page that ends with the last known token does not count: a step that computes this token may be planned, but
        it never starts if the sequence ends.
        """
        full: Ints = np.minimum(self.computed[slots], self.known[slots] - 1) // self.page
        return full

    def append(self, slots: Ints, tokens: Ints, now: float) -> NDArray[Any]:
        """Append one known token to each of `slots`.

        Returns an index into FINISH for each slot: whether and why its sequence ends.
        """
        known = self.known[slots]
        self.tokens[slots, known] = tokens
        self.known[slots] = known = known + 1
        self.last_token_at[slots] = now
        first = slots[known == self.prompt[slots] + 1]
        self.first_token_at[first] = now
        stop = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        return np.where(stop, 1, np.where(known >= self.limit[slots], 2, 0))
