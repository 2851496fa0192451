"""Tracks which frontend each request of the engine belongs to, and sorts a step's tokens by frontend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megakernel.serving.engine.request import Request
from megakernel.serving.engine.tokens import Tokens
from megakernel.serving.server import messages as seam


@dataclass(eq=False)
class Job:
    """Prompts that a frontend submitted together for one client. `open` counts the choices that have not ended."""

    frontend: bytes
    first: int
    client: str
    open: int
    requests: list[Request] = field(default_factory=list)


@dataclass(eq=False)
class Owner:
    """The job that a request belongs to. `open` counts the request's choices that have not ended."""

    job: Job
    open: int


class Addresses:
    """Maps a request's tag to its frontend, and to the number of the request's first choice at that frontend."""

    def __init__(self) -> None:
        self._frontends: list[bytes] = []
        self._frontend, self._first = np.zeros((2, 64), np.int64)  # by tag
        self._free = list(range(64))

    def take(self, frontend: bytes, first: int) -> int:
        """Allocate a tag for a request whose first choice has the number `first` at `frontend`."""
        if not self._free:
            size = len(self._first)
            self._free = list(range(size, 2 * size))
            self._frontend, self._first = (np.pad(column, (0, size)) for column in (self._frontend, self._first))
        if frontend not in self._frontends:
            self._frontends.append(frontend)
        tag = self._free.pop()
        self._frontend[tag], self._first[tag] = self._frontends.index(frontend), first
        return tag

    def give(self, tag: int) -> None:
        """Free a tag for another request."""
        self._free.append(tag)

    def sort(self, tokens: Tokens, at: float) -> dict[bytes, seam.Tokens]:
        """Return a message for each frontend, with its tokens of a step. The step ended at time `at`."""
        numbers, frontends = self._first[tokens.tag] + tokens.choice, self._frontend[tokens.tag]
        found = {}
        for frontend in np.unique(frontends):
            rows = np.flatnonzero(frontends == frontend)
            begun = rows[tokens.first[rows] & (tokens.choice[rows] == 0)]
            found[self._frontends[frontend]] = seam.Tokens(
                at,
                numbers[rows].tobytes(),
                tokens.token_id[rows].astype(np.int32).tobytes(),
                tokens.logprob[rows].astype(np.float32).tobytes(),
                tokens.finish[rows].astype(np.uint8).tobytes(),
                {int(np.searchsorted(rows, row)): tokens.top[row] for row in tokens.top if frontends[row] == frontend},
                [
                    seam.Score(int(numbers[row]), request.prompt_logprobs, request.prompt_top_logprobs)
                    for row in begun
                    if (request := tokens.sequence[row].request).params.prompt_logprobs is not None
                ],
                {int(numbers[row]): cached for row in begun if (cached := tokens.sequence[row].request.cached_tokens)},
            )
        return found
