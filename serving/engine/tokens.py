"""The tokens that a step generated, as arrays, and one by one for callers that prefer objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megakernel.runtime.sampling import Ints
from megakernel.serving.engine.request import Request
from megakernel.serving.engine.sampling import FINISH
from megakernel.serving.engine.slots import Objects


class Token(NamedTuple):
    """One generated token.

    If requested, `top_logprobs` holds the log-probabilities of the most likely ids and of this token's id.
    """

    request: Request
    choice: int
    token_id: int
    logprob: float
    top_logprobs: dict[int, float]
    finish_reason: str | None


@dataclass(frozen=True)
class Tokens:
    """The tokens of a step: one array per attribute, with one element per token, in the order of the step's rows."""

    sequence: Objects
    tag: Ints  # `Request.tag`
    choice: Ints
    token_id: Ints
    logprob: NDArray[np.float32]
    finish: Ints  # index into FINISH: why the token ends its choice
    first: NDArray[np.bool_]  # whether it is the first token of its choice
    waited: NDArray[np.float64]  # seconds since the choice's previous token, or since the request was added
    top: Mapping[int, dict[int, float]]  # index of a token -> its `Token.top_logprobs`, if requested

    def __len__(self) -> int:
        return len(self.token_id)

    def __iter__(self) -> Iterator[Token]:
        columns = (self.sequence, self.token_id, self.logprob, self.finish)
        for i, (sequence, token, logprob, finish) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            yield Token(sequence.request, sequence.choice, token, logprob, self.top.get(i, {}), FINISH[finish])
