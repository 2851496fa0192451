"""The engine's view of a request: a prompt, the sequences (choices) that continue it, their state while they run, and
their rows in a step. Every step changes the state of all running sequences. So a running sequence has a slot, and its
state is in `Slots`, which has arrays with one element per slot. A sequence that does not run holds its tokens itself.
A planned step, `PlannedRows`, says which tokens of each sequence it computes, and which of them get logits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dims, to_f32
from megakernel.runtime.steps import FLOATS, Ints, Lineup, SampleRow, Sampling, SequencePages
from megakernel.serving.engine.grammars import Constraint
from megakernel.serving.engine.sampling import SamplingParams, TokenIds

Objects = NDArray[np.object_]
VERIFIED_ROWS = 128  # maximum logit rows of a step that verifies proposals, limited by room for logit biases
ROOT = b""  # the hash of an empty prefix, see `page_hash`
POOLED = -2  # in place of a number of top log-probabilities: the request wants hidden states


def page_hash(before: bytes, tokens: TokenIds) -> bytes:
    """Return the hash of a prefix of whole pages: `tokens` are the tokens of the last page, and `before` is the hash
    without this page."""
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()


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
    admitted_at: float = 0.0  # time at which the choice began to run
    saved: TokenIds = field(init=False)  # its tokens, up to the time when it last left its slot
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saved = self.request.prompt_ids

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens of the prompt and of the output from number `start` on."""
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

    def append(self, token: int) -> int:
        """Append a token that was being sampled when the sequence was preempted and lost its slot. Returns
        0, or an index into FINISH if the token ends the sequence."""
        self.saved = np.append(self.saved, np.int32(token))
        self.sampling = False
        return 1 if token in self.request.stop_ids else 2 * (len(self.saved) >= self.length_limit)

    def page_hashes(self, page: int, count: int) -> list[bytes]:
        """Return the hashes that identify the first `count` KV pages of the sequence. Each page has `page` tokens,
        which must all be known."""
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
    first: int = 0  # number of the first choice (completion); further choices have the next numbers
    reader: int = 0  # number of the process that reads the tokens
    client: str = ""  # name of the client; waiting clients are admitted in turn
    choices: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # element i is the log-probability of prompt token i + 1
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int | None = None  # prompt tokens that were in the prefix cache; None before the request is admitted
    pooled: NDArray[np.float64] | None = None  # sum of the hidden states that `params.pooling` asks for, so far
    pooled_rows: int = 0  # number of hidden states in the sum `pooled`
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
    planned before the running one has ended. So `length` also counts tokens that planned steps have yet to sample. And
    `computed` counts tokens whose K and V will be in the pages once all planned steps have run."""

    def __init__(self, dims: Dims) -> None:
        n = dims.bucket.max_seqs
        self.dims, self.page = dims, dims.bucket.kv_page
        self.order: Ints = np.zeros(0, np.int64)  # a new array after each change, so that `is` shows whether it changed
        self.sequence: Objects = np.full(n, None)
        self.ticket = np.full(n, -1)  # number of the sequence's admission; -1: the slot is free
        self.reader, self.number = np.zeros((2, n), np.int64)  # see `Request.reader`, and the number of the choice
        self.tokens = np.zeros((n, dims.bucket.max_context + 1), np.int32)
        self.known, self.length, self.computed, self.known_pages = np.zeros((4, n), np.int64)
        self.freed = np.zeros(n, np.int64)  # how many of its first KV pages each sequence has given back, see `passed`
        self.limit, self.prompt, self.early_until = np.zeros((3, n), np.int64)
        # Ids that end each sequence, padded with -1.
        self.stop_ids = np.full((n, 1), -1)
        # How many top log-probabilities to report. -1: none; POOLED: none, but the hidden state is needed.
        self.top = np.full(n, -1)
        self.holds = np.zeros(n, np.bool_)  # whether other choices wait until this one has computed the prompt
        self.constrained = np.zeros(n, np.bool_)  # whether the sequence has a `Constraint`, such as a grammar
        self.constraints = 0  # number of running sequences with a `Constraint`
        self.last_token_at = np.zeros(n)  # 0 for a sequence that has no token since its admission
        self.pages = SequencePages(dims)
        self.sampling = Sampling(2 * n + 1)  # one row per slot, then one per slot for tokens before min_tokens
        self._tickets = 0

    def seat(self, slot: int, sequence: Sequence, pages: list[int], shared: int) -> None:
        """Put a sequence into `slot` with its KV `pages`. The first `shared` of them are cached, so already filled."""
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
        self.constraints += sequence.constraint is not None
        self.last_token_at[slot] = 0.0
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
        sequence.slot, self.ticket[slot], self.sequence[slot], self.constrained[slot] = -1, -1, None, False
        self.constraints -= sequence.constraint is not None
        self.order = self.order[self.order != slot]
        return self.pages_of(slot)

    def known_tokens(self, slot: int) -> TokenIds:
        """Return a view of the known tokens of a slot's sequence, prompt included."""
        return self.tokens[slot, : self.known[slot]]

    def pages_of(self, slot: int) -> list[int]:
        return self.pages.ids[slot, self.freed[slot] : self.pages.count[slot]].tolist()  # type: ignore[no-any-return]

    def passed(self, slots: Ints) -> Ints:
        """Return, for each slot, how many of its first KV pages no later step reads: all their tokens have left the
        sliding windows of all layers. Pages that are not in the prefix cache yet do not count."""
        next_row = np.minimum(self.computed[slots], self.known[slots] - 1)
        blocks = self.dims.first_block(next_row)
        return np.minimum(blocks * (self.dims.bucket.kv_block // self.page), self.known_pages[slots])

    def drop(self, slot: int, count: int) -> list[int]:
        """Remove the first `count` KV pages of a sequence, if it still has them, and return the removed ids."""
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
        """Return, for each slot, how many of its tokens, known or still to be sampled, no planned step computes. The
        result is 0 at the maximum length, because the last token is never computed."""
        length = self.length[slots]
        return np.where(length < self.limit[slots], length - self.computed[slots], 0)

    def crowded(self, slots: Ints) -> NDArray[np.bool_]:
        """Return for each slot whether its sequence needs another KV page, counting tokens not sampled yet."""
        return self.pages.count[slots] * self.page < self.length[slots]

    def steady(self, slots: Ints) -> int:
        """Return how many steps with one token per sequence can run before a sequence in `slots` needs another KV page
        or reaches its maximum length."""
        return int((np.minimum(self.pages.count[slots] * self.page, self.limit[slots] - 1) - self.length[slots]).min())

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

    def append(self, slots: Ints, tokens: Ints, now: float) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Append a sampled token to the sequence in each of `slots`. Returns for each whether it is the first, and an
        index into FINISH, which says whether and why the token ends the sequence. `now` is the time."""
        known = self.known[slots]
        self.tokens[slots, known] = tokens
        self.known[slots] = after = known + 1
        self.last_token_at[slots] = now
        finish = 2 * (after >= self.limit[slots])
        if np.count_nonzero(stop := self.stop_ids[slots] == tokens[:, None]):
            finish[stop.any(axis=1)] = 1
        return known == self.prompt[slots], finish


class _Row(NamedTuple):
    """The logit rows of a step. Each field is an array with one element per row, or the value of a single row. `Turns`
    and `Lineup` explain the fields."""

    chunk: Any
    index: Any
    place: Any
    target: Any
    store: Any
    top: Any
    after: Any


@dataclass(eq=False)
class Turns(Lineup):
    """The plan of a step: its chunks, each with the tokens that it computes for one sequence, and its logit rows, which
    sample a token or score a prompt token. It also has what the engine needs to process their results."""

    # -- one element per chunk
    ticket: Ints  # number that the sequence got when it was admitted to its slot
    sequence: Objects
    reader: Ints  # see `Request.reader`; `number` is that of the choice (completion)
    number: Ints
    # The following arrays have one element per logit row, a row that samples a token or scores a prompt token.
    top: Ints  # how many top log-probabilities to report, as in `Slots`
    after: Ints  # the row's input token if it was proposed or forced, otherwise -1

    @property
    def rows(self) -> _Row:
        return _Row(*(getattr(self, name) for name in _Row._fields))

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """For each logit row, whether it samples a token. Other logit rows give a prompt token's log-probability."""
        return self.target < 0

    @cached_property
    def depth(self) -> Ints:
        """For each logit row, how many proposed or forced tokens of its sequence the step has up to this row."""
        return np.where(self.after >= 0, self.index, 0)

    @cached_property
    def reported(self) -> list[int]:
        """The logit rows whose top log-probabilities are reported."""
        return (self.top >= 0).nonzero()[0].tolist()

    @cached_property
    def read(self) -> list[int]:
        """The logit rows whose logits the host has to read, because a request wants the most likely tokens."""
        return (self.top > 0).nonzero()[0].tolist()

    @cached_property
    def pooled(self) -> list[int]:
        """The logit rows whose hidden states the host has to read, because a request wants an embedding."""
        return (self.top == POOLED).nonzero()[0].tolist()  # type: ignore[no-any-return]

    def alive(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each chunk's sequence still has the slot that it had when the step was planned."""
        kept: NDArray[np.bool_] = slots.ticket[self.slot] == self.ticket
        return kept


class PlannedRows(NamedTuple):
    """Chunks of a step, each with consecutive tokens of one sequence. `start` has each chunk's first position."""

    turns: Turns
    start: Ints  # described in `StepRows`, as is `tokens`
    tokens: Ints

    def extensible(self, slots: Slots) -> Ints:
        """Return the chunks to which proposed tokens may be added. Such a chunk computes only the last known token of a
        running sequence."""
        turns = self.turns
        single = (turns.count == 1) & (np.bincount(turns.chunk, minlength=len(turns.slot)) == 1)
        found: Ints = (single & turns.alive(slots) & (self.start == slots.known[turns.slot] - 1)).nonzero()[0]
        return found


class Planner:
    """Plans the rows of steps for the sequences in `slots`. If the same sequences decode as in the last step, the last
    step's `Turns` is used again, because building a new one takes time."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._last: Turns | None = None

    def plan(self, ones: Ints, prompts: Seq[tuple[Sequence, int]]) -> PlannedRows:
        """Plan a step and return its chunks. `ones` has the slot numbers of the sequences that compute one token each.
        `prompts` has every other sequence of the step, with the number of tokens that it computes."""
        decoded = self._decode(ones)
        if not prompts:
            return decoded
        slots, turns = self._slots, decoded.turns
        rows: list[_Row] = []
        tokens = [decoded.tokens]
        slot, count = (np.array(column) for column in zip(*((one.slot, n) for one, n in prompts), strict=True))
        start = slots.computed[slot]
        for chunk, (sequence, length) in enumerate(prompts, len(ones)):
            tokens.append(self._prompt(chunk, sequence, length, rows))
        added = np.array(rows, np.int64).reshape(-1, len(_Row._fields)).T
        columns = [np.append(old, more.astype(old.dtype)) for old, more in zip(turns.rows, added, strict=True)]
        slot, count = np.append(turns.slot, slot), np.append(turns.count, count)
        return PlannedRows(
            _turns(slots, slot, count, _Row(*columns)), np.append(decoded.start, start), np.concatenate(tokens)
        )

    def _decode(self, slot: Ints) -> PlannedRows:
        """Plan one decode row for each of the slots `slot`: compute the last token and sample the next one."""
        slots, n, start = self._slots, len(slot), self._slots.computed[slot]
        slots.length[slot] += 1
        slots.computed[slot] = end = start + 1
        place = slots.place(slot, end)
        turns = self._last
        if turns is None or turns.slot is not slot or turns.place is not place:
            one, zero, none = np.ones(n, np.int64), np.zeros(n, np.int64), np.full(n, -1)
            row = _Row(np.arange(n), zero, place, none, one > 0, slots.top[slot], none)
            turns = self._last = _turns(slots, slot, one, row)
        known = start < slots.known[slot]
        if not np.count_nonzero(known):
            return PlannedRows(turns, start, turns.after)  # tokens of -1: not sampled yet
        return PlannedRows(turns, start, np.where(known, slots.tokens[slot, start], -1))

    def _prompt(self, chunk: int, sequence: Sequence, count: int, rows: list[_Row]) -> Ints:
        """Plan to compute the next `count` tokens of a sequence as the chunk number `chunk` of a step, and return the
        tokens. The rows that need logits are appended to `rows`."""
        slots, request, slot = self._slots, sequence.request, sequence.slot
        start, known = int(slots.computed[slot]), int(slots.known[slot])
        end = start + count
        if sequence.scoring:
            prompt, top = request.prompt_ids, POOLED if request.params.pooling else request.params.prompt_logprobs or 0
            first, last = max(start, request.scored), min(end, len(prompt) - 1)
            rows += [_Row(chunk, at - start, -1, prompt[at + 1], False, top, -1) for at in range(first, last)]
            request.scored = max(last, request.scored)
        if end == slots.length[slot]:
            place = int(slots.place(np.array(slot), np.array(end)))
            rows.append(_Row(chunk, count - 1, place, -1, True, int(slots.top[slot]), -1))
            slots.length[slot] += 1
        slots.computed[slot] = end
        tokens = slots.tokens[slot, start:end].copy()
        tokens[known - start :] = -1
        return tokens


def extended(part: PlannedRows, slots: Slots, runs: Mapping[int, Seq[int]]) -> PlannedRows:
    """Append proposed or forced tokens to sequences that compute one token in `part`, and return the new plan.

    `runs` maps a chunk (a sequence's index in the step) to its additional tokens. Each additional token gets a logit
    row. Sequences that have ended since the step was planned are left out, because other sequences may now use their
    pages.

    Sampled tokens are normally stored by the step, in the device buffer HISTORY. Up to the first mismatch, they equal
    the additional tokens. For a sequence with penalties, the step reads HISTORY, so the host writes the additional
    tokens there before the step. The step then stores no tokens of this sequence."""
    turns, start = part.turns, part.start
    chunks = np.array(sorted(runs))
    lengths = np.array([len(runs[chunk]) for chunk in chunks])
    slot, stores = turns.slot[chunks], ~slots.sampling.penalised[turns.slot]
    slots.computed[slot] += lengths
    slots.length[slot] += lengths
    count = turns.count.copy()
    count[chunks] += lengths

    new = np.concatenate([runs[chunk] for chunk in chunks])
    ends = np.cumsum(turns.count)[chunks]  # index in `part.tokens` after the last token of each of these chunks
    tokens = part.tokens.copy()
    tokens[ends - 1] = slots.tokens[slot, start[chunks]]
    tokens = np.insert(tokens, np.repeat(ends, lengths), new)

    of = np.repeat(chunks, lengths)
    index = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    place = slots.place(turns.slot[of], start[of] + index + 1)
    none = np.full(len(of), -1)
    added = _Row(of, index, place, none, stores[of], np.repeat(slots.top[slot], lengths), new)
    at = np.searchsorted(turns.chunk, of, side="right")
    old = turns.rows._replace(store=turns.store & (stores[turns.chunk] | ~np.isin(turns.chunk, chunks)))
    alive = turns.alive(slots)
    columns = [np.insert(column, at, more) for column, more in zip(old, added, strict=True)]
    rows = _Row(*(column[alive[columns[0]]] for column in columns))
    rows = rows._replace(chunk=(np.cumsum(alive) - 1)[rows.chunk])
    return PlannedRows(
        _turns(slots, turns.slot[alive], count[alive], rows), start[alive], tokens[np.repeat(alive, count)]
    )


def _turns(slots: Slots, slot: Ints, count: Ints, rows: _Row) -> Turns:
    """Return the plan of a step that computes `count` tokens for each `slot`. `rows` has its fields for logit rows."""
    names = ("ticket", "sequence", "reader", "number")
    return Turns(slot=slot, count=count, **{name: getattr(slots, name)[slot] for name in names}, **rows._asdict())
