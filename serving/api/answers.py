"""From the tokens that an engine generates to the text, scores and ends that a client sees."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...model.tokenizer import Tokenizer
from ..async_engine import AsyncEngine, Job, Piece
from ..sampling import SamplingParams
from ..text import TextStream
from .metrics import Metrics
from .responses import FinishReason


@dataclass
class Delta:
    """What is new of one choice; `index` counts the choices of all prompts. `text` is only what became certain."""

    index: int
    prompt: int
    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]


@dataclass
class _Choice:
    stream: TextStream | None
    tokens: int = 0
    last_at: float = 0.0
    ended: bool = False


class Answers:
    """The choices of one HTTP request. Whoever stops before they are `finished` must `close`."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        """Submits the prompts. Raises MegakernelError: what can never run, Overloaded, EngineDead."""
        self.params = params
        self.completion_tokens = 0
        self._engine, self._metrics = engine, metrics
        self.job: Job = engine.submit(engine.check(prompts, params), params)
        stops = params.stop_strings
        self._choices = [
            _Choice(TextStream(tokenizer.stream(), stops) if tokenizer else None)
            for _ in range(len(prompts) * params.n)
        ]
        self._left = len(self._choices)
        self._held: list[Piece] = []
        self._scored_prompts: set[int] = set()
        metrics.prompts(prompts)

    @property
    def finished(self) -> bool:
        return not self._left

    async def take(self) -> list[Delta]:
        """What is new since the last call, at most one delta per choice: a late reader gets tokens merged."""
        while True:
            if deltas := self._feed(self._scored(await self.job.take())):
                return deltas

    async def collect(self) -> list[Delta]:
        """Every choice as a whole, in order."""
        choices: dict[int, Delta] = {}
        while not self.finished:
            for delta in await self.take():
                whole = choices.setdefault(delta.index, Delta(delta.index, delta.prompt))
                whole.text += delta.text
                whole.pieces += delta.pieces
                whole.finish_reason = delta.finish_reason
        return [choices[index] for index in sorted(choices)]

    def close(self) -> None:
        """Give up what is not finished."""
        self._engine.abort(self.job)

    def _scored(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces whose prompt's scores are known, which is when its first choice begins."""
        if self.params.prompt_logprobs is None:
            return pieces
        pieces, self._held = self._held + pieces, []
        self._scored_prompts.update(piece.prompt for piece in pieces if piece.choice == 0)
        ready = [piece for piece in pieces if piece.prompt in self._scored_prompts]
        self._held = [piece for piece in pieces if piece.prompt not in self._scored_prompts]
        return ready

    def _feed(self, pieces: list[Piece]) -> list[Delta]:
        deltas: dict[int, Delta] = {}
        for piece in pieces:
            index = piece.prompt * self.params.n + piece.choice
            choice = self._choices[index]
            if choice.ended:
                continue  # its text ended before the engine knew
            delta = deltas.get(index)
            if delta is None:
                delta = deltas[index] = Delta(index, piece.prompt)
            delta.pieces.append(piece)
            self._add(choice, piece, delta)
        return list(deltas.values())

    def _add(self, choice: _Choice, piece: Piece, delta: Delta) -> None:
        choice.tokens += 1
        self.completion_tokens += 1
        if choice.tokens == 1:
            self._metrics.first_token(piece.at - self.job.submitted_at)
        else:
            self._metrics.next_token(piece.at - choice.last_at)
        choice.last_at = piece.at
        reason, stream = _reason(piece), choice.stream
        if stream is not None:
            search = choice.tokens >= self.params.min_tokens
            if reason != "stop":  # an id that ends the text is not part of it
                stream.add(piece.token_id, search)
            if reason is not None:
                stream.finish(search)
            if stream.stopped:
                reason = "stop"
            delta.text += stream.take(final=reason is not None)
        if reason is not None:
            choice.ended, delta.finish_reason = True, reason
            self._left -= 1
            self._metrics.finished(reason, piece.at - self.job.submitted_at, choice.tokens)
            if not self._left:
                self.close()


def _reason(piece: Piece) -> FinishReason | None:
    match piece.finish_reason:
        case "stop" | "length" | None as reason:
            return reason
        case other:
            raise AssertionError(f"a token with reason {other}")
