"""From the tokens that an engine generates to what a client sees of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..async_engine import AsyncEngine, Piece
from ..engine import Token
from ..sampling import SamplingParams
from ..transcript import Transcript
from .metrics import Metrics
from .responses import FinishReason

_REASONS: dict[str | None, FinishReason | None] = {"stop": "stop", "length": "length", None: None}


@dataclass
class Delta:
    """What is new of one choice; `index` counts the choices of all prompts. `text` is only what became certain."""

    index: int
    prompt: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class Answers:
    """The choices of one HTTP request. Whoever stops before they are `finished` must `close`."""

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        transcripts: Callable[[], list[Transcript]],
    ) -> None:
        """Submits the prompts; `transcripts` makes those of one prompt's choices. Raises as AsyncEngine.submit."""
        self.completion_tokens = 0
        self.job = engine.submit(prompts, params)
        self._engine, self._metrics, self._params = engine, metrics, params
        self._transcripts = [transcript for _ in prompts for transcript in transcripts()]
        self._last_at = [0.0] * len(self._transcripts)
        self._left = len(self._transcripts)
        self._held: list[Piece] = []
        self._scored: set[int] = set()
        metrics.prompts(prompts)

    @property
    def finished(self) -> bool:
        return not self._left

    async def take(self) -> list[Delta]:
        """What is new since the last call, at most one delta per choice: a late reader gets tokens merged."""
        deltas: dict[int, Delta] = {}
        while not deltas:
            for piece in self._with_scores(await self.job.take()):
                self._add(piece, deltas)
        return list(deltas.values())

    async def collect(self) -> list[Delta]:
        """Every choice as a whole, in order."""
        choices: dict[int, Delta] = {}
        while not self.finished:
            for piece in self._with_scores(await self.job.take()):
                self._add(piece, choices)
        return [choices[index] for index in sorted(choices)]

    def close(self) -> None:
        """Give up what is not finished."""
        self._engine.abort(self.job)

    def _with_scores(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces whose prompt's scores are known where they are wanted: when its first choice begins."""
        if self._params.prompt_logprobs is None:
            return pieces
        pieces = self._held + pieces
        self._scored.update(piece.prompt for piece in pieces if piece.token.choice == 0)
        self._held = [piece for piece in pieces if piece.prompt not in self._scored]
        return [piece for piece in pieces if piece.prompt in self._scored]

    def _add(self, piece: Piece, deltas: dict[int, Delta]) -> None:
        prompt, token, at = piece
        index = prompt * self._params.n + token.choice
        transcript = self._transcripts[index]
        if transcript.finish_reason is not None:
            return  # generated before the engine knew of the stop string
        if (delta := deltas.get(index)) is None:
            delta = deltas[index] = Delta(index, prompt)
        delta.text += transcript.add(token)
        delta.tokens.append(token)
        delta.finish_reason = reason = _REASONS[transcript.finish_reason]
        self.completion_tokens += 1
        if self._last_at[index]:
            self._metrics.next_token(at - self._last_at[index])
        else:
            self._metrics.first_token(at - self.job.submitted_at)
        self._last_at[index] = at
        if reason is not None:
            self._engine.stop(self.job, prompt, token.choice)  # nothing, where the engine ended it
            self._left -= 1
            self._metrics.finished(reason, at - self.job.submitted_at, len(transcript.token_ids))
