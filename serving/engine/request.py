"""The engine's view of a request: a prompt and the sequences (choices) that continue it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from megakernel.runtime.sampling import FLOATS, SampleRow
from megakernel.serving.engine.constraint import Constraint
from megakernel.serving.engine.draft import Draft
from megakernel.serving.engine.pages import ROOT, page_hash
from megakernel.serving.engine.sampling import FINISH, SamplingParams

if TYPE_CHECKING:
    from megakernel.serving.engine.slots import Slots


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request. While it runs, its state, including its newest tokens, is in `slots` at index `slot`.

    `sampling` is True if the sequence was preempted while the running launch still samples its next token.
    """

    request: Request
    choice: int
    length_limit: int  # at this number of tokens the choice ends with reason `length`
    slots: Slots
    slot: int = -1
    sampling: bool = False
    finish_reason: str | None = None
    first_token_at: float = 0.0  # valid, like last_token_at, only while the choice does not run
    last_token_at: float = 0.0
    draft: Draft | None = None
    constraint: Constraint | None = None  # limits which tokens may come next, if the request asks for that
    _tokens: list[int] = field(init=False)
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = list(self.request.prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the generated tokens. It is always the same list object, which grows."""
        if self.slot >= 0:
            self._tokens += self.slots.tokens[self.slot, len(self._tokens) : self.slots.known[self.slot]].tolist()
        return self._tokens

    @property
    def stuck(self) -> str:
        """The reason why the constraint allows no next token; empty if it allows one."""
        return self.constraint.error if self.constraint else ""

    @property
    def waits_since(self) -> float:
        """The time of the choice's last token. If it has no token yet, the time at which the request was added."""
        return (
            float(self.slots.last_token_at[self.slot])
            if self.slot >= 0
            else self.last_token_at or self.request.added_at
        )

    def append(self, token: int, now: float) -> str | None:
        """Append a token. Returns the finish reason if the token ends the sequence."""
        if self.slot >= 0:
            return FINISH[int(self.slots.append(np.array([self.slot]), np.array([token]), now)[0])]
        self._tokens.append(token)
        self.first_token_at, self.last_token_at = self.first_token_at or now, now
        self.sampling = False
        if token in self.request.stop_ids:
            return "stop"
        return "length" if len(self._tokens) >= self.length_limit else None

    @property
    def outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def computed(self) -> int:
        """How many of the first tokens have their K and V in `pages`, now or once all planned steps have run."""
        return int(self.slots.computed[self.slot]) if self.slot >= 0 else 0

    @property
    def pages(self) -> list[int]:
        return self.slots.pages_of(self.slot) if self.slot >= 0 else []

    @property
    def known_pages(self) -> int:
        """How many of the choice's `pages` are in the prefix cache."""
        return int(self.slots.known_pages[self.slot]) if self.slot >= 0 else 0

    @property
    def scoring(self) -> bool:
        """Whether the choice still computes log-probabilities of the prompt's tokens."""
        request = self.request
        return request.scores_prompt(self.choice) and request.scored < len(request.prompt_ids) - 1

    def page_hashes(self, page: int, count: int) -> list[bytes]:
        """Return the hashes of the first `count` pages of `page` tokens each. All these tokens must be known."""
        tokens = self.tokens
        for i in range(len(self._hashes), count):
            before = self._hashes[-1] if self._hashes else ROOT
            self._hashes.append(page_hash(before, tokens[i * page : (i + 1) * page]))
        return self._hashes[:count]

    def sample_row(self, *, early: bool) -> SampleRow:
        """Return the sampling parameters of the sequence as a row for the step table.

        If `early` is set, the row is for the tokens before min_tokens is reached, and forbids stop ids.
        """
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
    """A prompt with its parameters and choices.

    tag              a number that the caller of `Engine.add` gives, and that the generated tokens carry
    client           name of the client; clients take turns in having their requests admitted
    stop_ids         token ids that end a choice
    seed             the user's seed, or a random one
    prompt_logprobs  element i is the log-probability of prompt token i + 1
    cached_tokens    prompt tokens that were in the prefix cache; None before the request is admitted
    held             choices that wait until the first has computed the prompt, so that they share its pages
    scored           number of prompt tokens whose log-probabilities are computed or planned
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    tag: int = 0
    client: str = ""
    choices: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int | None = None
    held: list[Sequence] = field(default_factory=list)
    scored: int = 0
    seed: int = 0
    added_at: float = field(default_factory=perf_counter)

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def scores_prompt(self, choice: int) -> bool:
        """Whether this choice computes the prompt's log-probabilities. The first does so for all choices, if asked."""
        return choice == 0 and self.params.prompt_logprobs is not None
