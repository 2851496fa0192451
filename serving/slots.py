"""The sequences that run, as arrays: a column for each fact, an element for each slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..isa import Dims
from ..runtime.sampling import Ints, Sampling
from ..runtime.steps import Pages
from .request import Sequence

Objects = NDArray[np.object_]


class Slots:
    """Columns of the sequences that run, and `order`: their slots in the order in which they were admitted.

    Planning is ahead of what is known: `length` counts also the tokens that planned steps will have sampled, and of
    the first `computed` tokens K and V will be in the pages.
    """

    def __init__(self, dims: Dims) -> None:
        n = dims.max_seqs
        self.page = dims.kv_page
        self.order: Ints = np.zeros(0, np.int64)  # another array after each admission and departure
        self.sequence: Objects = np.full(n, None)
        self.ticket = np.full(n, -1)  # the number of the admission; -1: nobody runs here
        self.tag, self.choice = np.zeros((2, n), np.int64)
        self.tokens = np.zeros((n, dims.max_context), np.int32)
        self.known, self.length, self.computed, self.known_pages = np.zeros((4, n), np.int64)
        self.limit, self.prompt, self.early_until = np.zeros((3, n), np.int64)
        self.stop_ids = np.full((n, 1), -1)  # -1 beside the ids of those who have fewer
        self.top = np.full(n, -1)  # most likely tokens to report besides the chosen one; -1: none at all
        self.holds = np.zeros(n, np.bool_)  # whether other choices of its request wait for its prompt
        self.constrained = np.zeros(n, np.bool_)  # whether its text must match a grammar
        self.first_token_at, self.last_token_at = np.zeros((2, n))
        self.pages = Pages(dims)
        self.sampling = Sampling(2 * n + 1)  # of each slot, then of each slot for early tokens
        self._tickets = 0

    def seat(self, slot: int, sequence: Sequence, pages: list[int], shared: int) -> None:
        """Let a sequence run in `slot` with `pages`, of which `shared` ones hold its beginning."""
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
        """Take a sequence and its tokens out of its slot: the pages that it had."""
        slot, pages, _ = sequence.slot, sequence.pages, sequence.tokens
        sequence.first_token_at = float(self.first_token_at[slot])
        sequence.last_token_at = float(self.last_token_at[slot]) if sequence.first_token_at else 0.0
        sequence.slot, self.ticket[slot], self.sequence[slot], self.constrained[slot] = -1, -1, None, False
        self.order = self.order[self.order != slot]
        return pages

    def pages_of(self, slot: int) -> list[int]:
        return self.pages.ids[slot, : self.pages.count[slot]].tolist()  # type: ignore[no-any-return]

    def set_pages(self, slot: int, kept: int, more: list[int]) -> None:
        """Let the sequence's pages be the first `kept` ones that it has, then `more`."""
        self.pages.count[slot] = count = kept + len(more)
        self.pages.ids[slot, kept:count] = more
        self.pages.changed[:, slot] = True

    def add_page(self, slots: Ints, pages: list[int]) -> None:
        """One more page for each of `slots`."""
        self.pages.ids[slots, self.pages.count[slots]] = pages
        self.pages.count[slots] += 1
        self.pages.changed[:, slots] = True

    def pending(self, slots: Ints) -> Ints:
        """Tokens that no planned step sees and the next may: none where the last one is being sampled."""
        length = self.length[slots]
        return np.where(length < self.limit[slots], length - self.computed[slots], 0)

    def crowded(self, slots: Ints) -> NDArray[np.bool_]:
        """Whether the pages have no room for `length` tokens."""
        return self.pages.count[slots] * self.page < self.length[slots]

    def place(self, slots: Ints, position: Ints) -> Ints:
        """Where `sampling` says how to sample the tokens at `position` of sequences."""
        early = position < self.early_until[slots]
        return slots + len(self.ticket) * early if np.count_nonzero(early) else slots

    def place_of(self, slot: int, position: int) -> int:
        """`place` of one token."""
        return slot + len(self.ticket) * bool(position < self.early_until[slot])

    def full_pages(self, slots: Ints) -> Ints:
        """Pages that launches so far fill. Not the one that the last token ends: a sequence that ends with it may
        have been planned for a step that never starts.
        """
        full: Ints = np.minimum(self.computed[slots], self.known[slots] - 1) // self.page
        return full

    def append(self, slots: Ints, tokens: Ints, now: float) -> NDArray[Any]:
        """One more known token for each of `slots`: by index into FINISH, why it ends its sequence."""
        known = self.known[slots]
        self.tokens[slots, known] = tokens
        self.known[slots] = known = known + 1
        self.last_token_at[slots] = now
        first = slots[known == self.prompt[slots] + 1]
        self.first_token_at[first] = now
        stop = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        return np.where(stop, 1, np.where(known >= self.limit[slots], 2, 0))
