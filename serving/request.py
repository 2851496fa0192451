"""A prompt and the choices that continue it, as the engine sees them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from time import perf_counter

from ..runtime.step import SampleRow
from .sampling import SamplingParams
from .text import TextStream


@dataclass(eq=False)
class Sequence:
    """One choice. `tokens` is the prompt, then what was generated; K and V of the first `computed` are stored."""

    request: Request
    choice: int
    tokens: list[int]
    length_limit: int  # tokens at which it ends for length
    stream: TextStream | None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def pending(self) -> int:
        """Known tokens that no step has seen."""
        return len(self.tokens) - self.computed

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    def sample_row(self, index: int) -> SampleRow:
        """How to sample the next token from row `index` of a chunk."""
        p = self.request.params
        bias = dict(p.logit_bias)
        if self.outputs < p.min_tokens:
            bias |= dict.fromkeys(self.request.stop_ids, float("-inf"))
        return SampleRow(
            index=index,
            prompt_length=len(self.request.prompt_ids),
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            top_k=max(p.top_k, 0),
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=p.repetition_penalty,
            seed=self.request.seed,
            choice=self.choice,
            bias=bias,
        )


@dataclass(eq=False)
class Request:
    """`stop_ids` end a choice; `seed` is the user's or a drawn one. prompt_logprobs[i] scores prompt token i + 1."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    choices: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
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
