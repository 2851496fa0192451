"""The tokens that a step generated: one record from the engine, through the messages to a frontend, to its reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from megakernel.serving.engine.sampling import FINISH

_NO_TOP: dict[int, float] = {}


class Token(msgspec.Struct, gc=False):
    """One generated token. `choice` is the number of its choice, and `at` the time at which the token's step ended. If
    requested, `top_logprobs` holds the log-probabilities of the most likely ids and of this token's id."""

    choice: int
    token_id: int
    logprob: float
    top_logprobs: dict[int, float]
    finish_reason: str | None
    at: float


class Score(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of a prompt's tokens, from the second on. They come with the first token of `choice`."""

    choice: int
    logprobs: list[float]
    tops: list[dict[int, float]]


class Tokens(msgspec.Struct, tag=True, array_like=True):
    """The tokens of a step: one array per attribute, with one element per token, in the order of the step's rows."""

    at: float  # when the step ended, in seconds of `perf_counter`
    choice: NDArray[np.int64]  # numbers of the choices
    token_id: NDArray[np.int32]  # token ids
    logprob: NDArray[np.float32]  # log-probabilities of the tokens
    finish: NDArray[np.uint8]  # index into FINISH: why the token ends its choice
    top: dict[int, dict[int, float]]  # array index of a token -> its `Token.top_logprobs`, if requested
    scores: list[Score]  # log-probabilities of prompts whose first token is in this step, if requested
    cached: dict[int, int]  # choice -> its prompt's tokens in the prefix cache, if not 0; with a prompt's first token
    admitted: dict[int, float]  # choice -> when it first got a slot, in seconds of `perf_counter`; with its first token
    pooled: dict[int, NDArray[np.float32]]  # choice -> pooled hidden state of its prompt, if requested

    def __len__(self) -> int:
        return len(self.choice)

    def __iter__(self) -> Iterator[Token]:
        columns = (self.choice, self.token_id, self.logprob, self.finish)
        for i, (choice, token, logprob, finish) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            yield Token(choice, token, logprob, self.top.get(i, _NO_TOP), FINISH[finish], self.at)

    def where(self, mine: NDArray[np.bool_]) -> Tokens:
        """Return the tokens for which `mine` is True. The choices of a prompt are all among them, or none is."""
        if mine.all():
            return self
        choice = self.choice[mine]
        held = set(choice.tolist()) if self.admitted else set()
        return Tokens(
            self.at,
            choice,
            self.token_id[mine],
            self.logprob[mine],
            self.finish[mine],
            {int(np.count_nonzero(mine[:i])): top for i, top in self.top.items() if mine[i]},
            [score for score in self.scores if score.choice in held],
            {number: cached for number, cached in self.cached.items() if number in held},
            {number: at for number, at in self.admitted.items() if number in held},
            {number: state for number, state in self.pooled.items() if number in held},
        )


def pack(array: Any) -> bytes:
    """Return the bytes of an array, for a MessagePack encoder."""
    return array.tobytes()  # type: ignore[no-any-return]


def unpack(kind: Any, data: Any) -> Any:
    """Return the array that has the bytes `data`. `kind` is its type, such as NDArray[np.int32]."""
    return np.frombuffer(data, get_args(get_args(kind)[1])[0])
