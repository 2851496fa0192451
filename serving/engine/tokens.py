"""The tokens that a step generated, as the engine sends them to the processes that read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from megakernel.serving.engine.sampling import FINISH

TokenIds = NDArray[np.int32]
_NO_TOP: dict[int, float] = {}


class Token(msgspec.Struct, gc=False):
    """One generated token. `choice` is the number of its choice (completion), and `at` the time at which its step
    ended. If requested, `top_logprobs` has the log-probabilities of the most likely ids and of this token's id."""

    choice: int
    token_id: int
    logprob: float
    top_logprobs: dict[int, float]
    finish_reason: str | None
    at: float


class Score(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of a prompt's tokens, from the second on, each with those of the most likely ids in `tops`.
    They are sent together with the first token of `choice`."""

    choice: int
    logprobs: list[float]
    tops: list[dict[int, float]]


class Tokens(msgspec.Struct, tag=True, array_like=True):
    """The tokens that one step generated: one array per attribute, with one element per token, in the order of the
    step's rows. A choice is one completion of a prompt, identified by a number."""

    at: float  # when the step ended, in seconds of `perf_counter`
    choice: NDArray[np.int64]  # numbers of the choices
    token_id: NDArray[np.int32]  # token ids
    logprob: NDArray[np.float32]  # log-probabilities of the tokens
    finish: NDArray[np.uint8]  # whether and why each token ends its choice, as an index into FINISH
    top: dict[int, dict[int, float]]  # index of a token in the arrays -> its `Token.top_logprobs`, if requested
    # Log-probabilities of prompts, if requested, sent with the first generated token.
    scores: list[Score]
    # Choice -> number of its prompt's tokens found in the prefix cache, if not 0; sent with the first token.
    cached: dict[int, int]
    # Choice -> when it was first admitted, in seconds of `perf_counter`; sent with its first token.
    admitted: dict[int, float]
    pooled: dict[int, NDArray[np.float32]]  # choice -> last or mean hidden state of its prompt, if requested

    def __len__(self) -> int:
        return len(self.choice)

    def __iter__(self) -> Iterator[Token]:
        columns = (self.choice, self.token_id, self.logprob, self.finish)
        for i, (choice, token, logprob, finish) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            yield Token(choice, token, logprob, self.top.get(i, _NO_TOP), FINISH[finish], self.at)

    def where(self, mine: NDArray[np.bool_]) -> Tokens:
        """Return one reader's tokens, those for which `mine` is True. A prompt's choices all have the same reader."""
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
