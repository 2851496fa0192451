"""A prompt and the choices that continue it, as the engine sees them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from time import perf_counter

from ..runtime.step import FLOATS, SampleRow
from .draft import Draft
from .pages import ROOT, page_hash
from .sampling import SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice. `tokens` is the prompt, then what was generated.

    Planning is ahead of that: `length` counts also the tokens that planned steps will have sampled, and of the first
    `computed` tokens K and V will be in `pages`.
    """

    request: Request
    choice: int
    tokens: list[int]
    length_limit: int  # tokens at which it ends for length
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    length: int = field(init=False)
    known_pages: int = 0  # of `pages`, those that the pool may share
    finish_reason: str | None = None
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    _hashes: list[bytes] = field(default_factory=list)
    draft: Draft | None = None
    _rows: dict[tuple[int, bool], SampleRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that no planned step sees and the next may: none where the last one is being sampled."""
        return self.length - self.computed if self.length < self.length_limit else 0

    @property
    def scoring(self) -> bool:
        """Whether the next rows of it score the prompt."""
        request = self.request
        return request.scores_prompt(self.choice) and request.scored < len(request.prompt_ids) - 1

    @property
    def outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def page_hashes(self, page: int, count: int) -> list[bytes]:
        """Hashes of the first `count` pages of `page` tokens each, which must be known."""
        for i in range(len(self._hashes), count):
            before = self._hashes[-1] if self._hashes else ROOT
            self._hashes.append(page_hash(before, self.tokens[i * page : (i + 1) * page]))
        return self._hashes[:count]

    @property
    def penalised(self) -> bool:
        """Whether its choices depend on which tokens HISTORY has."""
        return self.sample_row(0, self.length).penalised

    def sample_row(self, index: int, start: int, *, store: bool = True) -> SampleRow:
        """How to sample the token after row `index` of a chunk that begins at token `start`."""
        p = self.request.params
        early = start + index + 1 - len(self.request.prompt_ids) < p.min_tokens
        if not early and (known := self._rows.get((index, store))):
            return known
        row = SampleRow(
            index=index,
            store=store,
            prompt_length=len(self.request.prompt_ids),
            top_k=max(p.top_k, 0),
            **{name: getattr(p, name) for name in FLOATS},
            seed=self.request.seed,
            choice=self.choice,
            bias=dict(p.logit_bias) | (dict.fromkeys(self.request.stop_ids, float("-inf")) if early else {}),
        )
        if not early:
            self._rows[index, store] = row
        return row


@dataclass(eq=False, slots=True)
class Request:
    """`stop_ids` end a choice; `seed` is the user's or a drawn one. prompt_logprobs[i] scores prompt token i + 1.

    `cached_tokens` of the prompt were in the prefix cache; None before the request is admitted. `held` are choices
    that wait until the first has computed the prompt, to share its pages. `scored` prompt tokens have their score or
    are about to.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
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
        """The first choice scores the prompt for all."""
        return choice == 0 and self.params.prompt_logprobs is not None
