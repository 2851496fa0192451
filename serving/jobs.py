"""Whose requests an engine runs, and the tokens of a step sorted by whom they are for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .engine import Step
from .request import Request
from .seam import REASONS, Score, Tokens

_CODES = {reason: code for code, reason in enumerate(REASONS)}


@dataclass(eq=False)
class Job:
    """Prompts that a frontend asked for together; `open` choices of them have not ended."""

    frontend: bytes
    first: int
    open: int
    requests: list[Request] = field(default_factory=list)


@dataclass(eq=False)
class Owner:
    """Whose a request is, and what number its first choice has there. `scored`: its prompt's scores were sent."""

    job: Job
    first: int
    open: int
    scored: bool = False


@dataclass
class _Rows:
    choices: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    tops: dict[int, dict[int, float]] = field(default_factory=dict)
    scores: list[Score] = field(default_factory=list)


def by_frontend(step: Step, owners: dict[Request, Owner], at: float) -> tuple[dict[bytes, Tokens], list[Request]]:
    """A step's tokens for each frontend that has some; and the request of each choice that ended, once per choice."""
    found: dict[bytes, _Rows] = {}
    ended: list[Request] = []
    for request, choice, token_id, logprob, top, reason in step.tokens:
        owner = owners[request]
        rows = found.get(owner.job.frontend)
        if rows is None:
            rows = found[owner.job.frontend] = _Rows()
        if top:
            rows.tops[len(rows.ids)] = top
        if choice == 0 and request.params.prompt_logprobs is not None and not owner.scored:
            owner.scored = True
            rows.scores.append(Score(owner.first, request.prompt_logprobs, request.prompt_top_logprobs))
        rows.choices.append(owner.first + choice)
        rows.ids.append(token_id)
        rows.logprobs.append(logprob)
        rows.reasons.append(_CODES[reason])
        if reason is not None:
            ended.append(request)
    return {frontend: _tokens(rows, at) for frontend, rows in found.items()}, ended


def _tokens(rows: _Rows, at: float) -> Tokens:
    return Tokens(
        at,
        np.array(rows.choices, np.int64).tobytes(),
        np.array(rows.ids, np.int32).tobytes(),
        np.array(rows.logprobs, np.float32).tobytes(),
        bytes(rows.reasons),
        rows.tops,
        rows.scores,
    )
