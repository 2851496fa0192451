"""The engine's view of a request: a prompt, the sequences (choices) that continue it, and their state while they run.
Every step changes the state of all running sequences. So a running sequence has a slot, and its state is in `Slots`,
which has arrays with one element per slot. A sequence that does not run holds its tokens itself."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dims, to_f32
from megakernel.runtime.steps import FLOATS, Ints, SampleRow, Sampling, SequencePages
from megakernel.serving.engine.grammars import Constraint
from megakernel.serving.engine.pages import ROOT, page_hash
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.tokens import TokenIds

Objects = NDArray[np.object_]
POOLED = -2  # in place of a number of top log-probabilities: the request wants hidden states


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One choice (completion) of a request. `slot` is the index of its slot, or -1 while it does not run. `sampling` is
    True if the sequence was preempted while the running launch still samples its next token."""

    request: Request
    choice: int
    length_limit: int  # at this number of tokens the choice ends with reason `length`
    slots: Slots
    constraint: Constraint | None = None  # limits which tokens may come next, such as a grammar
    slot: int = -1
    sampling: bool = False
    finish_reason: str | None = None
    first_token_at: float = 0.0  # like last_token_at, kept in `slots` instead while the choice runs
    last_token_at: float = 0.0
    admitted_at: float = 0.0  # time at which the choice began to run
    saved: TokenIds = field(init=False)  # its tokens, up to the time when it last left its slot
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saved = self.request.prompt_ids

    @property
    def tokens(self) -> list[int]:
        """The prompt and the generated tokens."""
        return self.tokens_from(0)

    def tokens_from(self, start: int) -> list[int]:
        known = self.saved if self.slot < 0 else self.slots.known_tokens(self.slot)
        return known[start:].tolist()  # type: ignore[no-any-return]

    @property
    def outputs(self) -> int:
        known = int(self.slots.known[self.slot]) if self.slot >= 0 else len(self.saved)
        return known - len(self.request.prompt_ids)

    @property
    def stuck(self) -> str:
        """Why the constraint (such as a grammar) allows no next token; empty if it allows one."""
        return self.constraint.error if self.constraint else ""

    @property
    def scoring(self) -> bool:
        """Whether the choice still computes log-probabilities of the prompt's tokens."""
        request = self.request
        return request.scores_prompt(self.choice) and request.scored < len(request.prompt_ids) - 1

    def append(self, token: int, now: float) -> int:
        """Append a token that was being sampled when the sequence was preempted and lost its slot. Returns what
        `Slots.append` returns: 0, or an index into FINISH if the token ends the sequence."""
        self.saved = np.append(self.saved, np.int32(token))
        self.first_token_at, self.last_token_at = self.first_token_at or now, now
        self.sampling = False
        return 1 if token in self.request.stop_ids else 2 * (len(self.saved) >= self.length_limit)

    def page_hashes(self, page: int, count: int) -> list[bytes]:
        """Return the hashes that identify the first `count` KV pages, with `page` tokens each. All tokens must be
        known."""
        tokens = self.slots.tokens[self.slot] if self.slot >= 0 else self.saved
        for i in range(len(self._hashes), count):
            before = self._hashes[-1] if self._hashes else ROOT
            self._hashes.append(page_hash(before, tokens[i * page : (i + 1) * page]))
        return self._hashes[:count]

    def sample_row(self, *, early: bool) -> SampleRow:
        """Return the sampling parameters of the sequence as a row for the step table. If `early` is set, the row is for
        the tokens before min_tokens is reached, and forbids stop ids."""
        p = self.request.params
        return SampleRow(
            index=0,
            prompt_length=len(self.request.prompt_ids),
            top_k=max(p.top_k, 0),
            **{name: getattr(p, name) for name in FLOATS},
            seed=self.request.seed,
            choice=self.choice,
            bias=dict(p.logit_bias) | (dict.fromkeys(self.request.stop_ids, float("-inf")) if early else {}),
        )


@dataclass(eq=False, slots=True)
class Request:
    """A prompt with its parameters and choices."""

    id: int
    prompt_ids: TokenIds
    params: SamplingParams
    stop_ids: frozenset[int]  # token ids that end a choice
    first: int = 0  # number of the first choice; the others follow, and each token carries the number of its choice
    reader: int = 0  # number of the process that reads the tokens
    client: str = ""  # name of the client; waiting clients are admitted in turn
    choices: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # element i is the log-probability of prompt token i + 1
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int | None = None  # prompt tokens that were in the prefix cache; None before the request is admitted
    pooled: NDArray[np.float64] | None = None  # sum of the hidden states that `params.pooling` asks for, so far
    pooled_rows: int = 0  # the number of these hidden states
    held: list[Sequence] = field(default_factory=list)  # choices that wait until the first has computed the prompt
    scored: int = 0  # if the prompt is scored: how many of its tokens have been scored, or will be by planned steps
    seed: int = 0  # the user's seed, or a random one
    added_at: float = field(default_factory=perf_counter)

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def scores_prompt(self, choice: int) -> bool:
        """Whether this choice needs logits or the hidden state of each prompt token, for log-probabilities or for a
        mean of hidden states. Only the first choice does, on behalf of all choices."""
        return choice == 0 and (self.params.prompt_logprobs is not None or self.params.pooling == "mean")

    def pool(self, hidden: NDArray[np.generic]) -> None:
        """Add the hidden state of the next prompt token to the sum. States are added one at a time, so that rounding
        does not depend on how steps divide the prompt."""
        state = to_f32(hidden).astype(np.float64)
        self.pooled, self.pooled_rows = state if self.pooled is None else self.pooled + state, self.pooled_rows + 1


class Slots:
    """Arrays with the state of the running sequences. `order` lists their slots in order of admission. The next step is
    planned before the running one has ended. So `length` also counts tokens that planned steps have yet to sample, and
    `computed` counts tokens whose K and V will be in the pages once all planned steps have run."""

    def __init__(self, dims: Dims) -> None:
        n = dims.bucket.max_seqs
        self.dims, self.page = dims, dims.bucket.kv_page
        self.order: Ints = np.zeros(0, np.int64)  # a new array after each change, so that `is` shows whether it changed
        self.sequence: Objects = np.full(n, None)
        self.ticket = np.full(n, -1)  # number of the sequence's admission; -1: the slot is free
        self.reader, self.number = np.zeros((2, n), np.int64)  # see `Request.reader`, and the number of the choice
        self.tokens = np.zeros((n, dims.bucket.max_context), np.int32)
        self.known, self.length, self.computed, self.known_pages = np.zeros((4, n), np.int64)
        self.freed = np.zeros(n, np.int64)  # first pages that the sequence no longer has, see `passed`
        self.limit, self.prompt, self.early_until = np.zeros((3, n), np.int64)
        # Ids that end each sequence, padded with -1.
        self.stop_ids = np.full((n, 1), -1)
        # How many top log-probabilities to report. -1: none; POOLED: none, but the hidden state is needed.
        self.top = np.full(n, -1)
        self.holds = np.zeros(n, np.bool_)  # whether other choices wait until this one has computed the prompt
        self.constrained = np.zeros(n, np.bool_)  # whether the sequence has a `Constraint`, such as a grammar
        self.first_token_at, self.last_token_at = np.zeros((2, n))
        self.pages = SequencePages(dims)
        self.sampling = Sampling(2 * n + 1)  # one row per slot, then one for use before min_tokens is reached
        self._tickets = 0

    def seat(self, slot: int, sequence: Sequence, pages: list[int], shared: int) -> None:
        """Put a sequence into `slot` with the KV pages `pages`, of which the first `shared` ones are filled."""
        request, tokens = sequence.request, sequence.saved
        stop, logprobs = sorted(request.stop_ids), request.params.logprobs
        if (more := len(stop) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[slot], self.stop_ids[slot, : len(stop)] = -1, stop
        sequence.admitted_at = sequence.admitted_at or perf_counter()
        self.sequence[slot], self.reader[slot] = sequence, request.reader
        self.number[slot] = request.first + sequence.choice
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = self.length[slot] = len(tokens)
        self.computed[slot], self.known_pages[slot], self.freed[slot] = shared * self.page, shared, 0
        self.limit[slot], self.prompt[slot] = sequence.length_limit, len(request.prompt_ids)
        self.early_until[slot] = len(request.prompt_ids) + request.params.min_tokens
        self.top[slot] = POOLED if request.params.pooling else -1 if logprobs is None else logprobs
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
        """Remove a sequence from its slot, copy its tokens to the sequence, and return its KV pages."""
        slot = sequence.slot
        sequence.saved = self.known_tokens(slot).copy()
        sequence.first_token_at = float(self.first_token_at[slot])
        sequence.last_token_at = float(self.last_token_at[slot]) if sequence.first_token_at else 0.0
        sequence.slot, self.ticket[slot], self.sequence[slot], self.constrained[slot] = -1, -1, None, False
        self.order = self.order[self.order != slot]
        return self.pages_of(slot)

    def known_tokens(self, slot: int) -> TokenIds:
        """Return a view of the known tokens of a slot's sequence, prompt included."""
        return self.tokens[slot, : self.known[slot]]

    def pages_of(self, slot: int) -> list[int]:
        return self.pages.ids[slot, self.freed[slot] : self.pages.count[slot]].tolist()  # type: ignore[no-any-return]

    def passed(self, slots: Ints) -> Ints:
        """Return, for each slot, how many of its sequence's first pages no later step reads, because all tokens that
        they hold have left the sliding windows of all layers. Pages that the prefix cache does not know yet stay."""
        next_row = np.minimum(self.computed[slots], self.known[slots] - 1)
        blocks = self.dims.first_block(next_row)
        return np.minimum(blocks * (self.dims.bucket.kv_block // self.page), self.known_pages[slots])

    def drop(self, slot: int, count: int) -> list[int]:
        """Remove all of the sequence's first `count` pages that it still has, and return them."""
        dropped: list[int] = self.pages.ids[slot, self.freed[slot] : count].tolist()
        self.freed[slot] = count
        return dropped

    def set_pages(self, slot: int, kept: int, more: list[int]) -> None:
        """Keep the first `kept` pages of a slot's sequence, and append the pages `more` to them."""
        self.pages.count[slot] = count = kept + len(more)
        self.pages.ids[slot, kept:count] = more
        self.pages.changed[:, slot] = True

    def add_page(self, slots: Ints, pages: list[int]) -> None:
        self.pages.ids[slots, self.pages.count[slots]] = pages
        self.pages.count[slots] += 1
        self.pages.changed[:, slots] = True

    def pending(self, slots: Ints) -> Ints:
        """Return, for each slot, how many known or sampled tokens no planned step computes yet. A sequence that has
        reached its maximum length needs none, so the result is 0."""
        length = self.length[slots]
        return np.where(length < self.limit[slots], length - self.computed[slots], 0)

    def crowded(self, slots: Ints) -> NDArray[np.bool_]:
        """Return for each slot whether its sequence needs another KV page, also for tokens not sampled yet."""
        return self.pages.count[slots] * self.page < self.length[slots]

    def place(self, slots: Ints, position: Ints) -> Ints:
        """Return the index of the row of `sampling` that applies to each slot's token at `position`. Each slot has a
        separate row for the tokens before min_tokens is reached."""
        early = position < self.early_until[slots]
        return slots + len(self.ticket) * early if np.count_nonzero(early) else slots

    def full_pages(self, slots: Ints) -> Ints:
        """Return, for each slot, how many pages the launches so far have filled. A page that ends with the last known
        token does not count: a step that computes this token may be planned, but it never starts if that token ends the
        sequence."""
        full: Ints = np.minimum(self.computed[slots], self.known[slots] - 1) // self.page
        return full

    def append(self, slots: Ints, tokens: Ints, now: float) -> NDArray[Any]:
        """Append a sampled token to the sequence in each of `slots`. Returns for each an index into FINISH, which says
        whether and why the token ends the sequence. `now` is the time."""
        known = self.known[slots]
        self.tokens[slots, known] = tokens
        self.known[slots] = known = known + 1
        self.last_token_at[slots] = now
        first = slots[known == self.prompt[slots] + 1]
        self.first_token_at[first] = now
        stop = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        return np.where(stop, 1, np.where(known >= self.limit[slots], 2, 0))
