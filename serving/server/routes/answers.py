"""Turns the tokens that the engine generates for one HTTP request into the text of its choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.server.client import EngineClient, Piece
from megakernel.serving.server.metrics import Metrics
from megakernel.serving.server.routes.bodies import FinishReason
from megakernel.serving.server.turns import CLIENT
from megakernel.serving.text.transcript import Transcript

_REASONS: dict[str | None, FinishReason | None] = {"stop": "stop", "length": "length", None: None}


@dataclass(slots=True)
class Delta:
    """The new text and tokens of one choice. `index` is the number of the choice among the choices of all prompts, and
    `prompt` is the number of its prompt.

    `text` contains only text that later tokens cannot change.
    """

    index: int
    prompt: int
    text: str = ""
    tokens: list[Piece] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class Answers:
    """The choices of one HTTP request, while the engine generates them. A caller that stops before `finished` is true
    must call `close`.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        transcripts: Callable[[], list[Transcript]],
    ) -> None:
        """Submit the prompts to the engine.

        `transcripts` returns a list with one new transcript for each choice of a prompt. A transcript collects the
        tokens and the text of its choice.

        Raises what `EngineClient.submit` raises.
        """
        self.completion_tokens = 0
        self.job = engine.submit(prompts, params, CLIENT.get())
        self._engine, self._metrics, self._params = engine, metrics, params
        self._prompts = prompts
        self._transcripts = [transcript for _ in prompts for transcript in transcripts()]
        self._last_at = [0.0] * len(self._transcripts)
        self._left = len(self._transcripts)
        self._held: dict[int, list[Piece]] = {}

    @property
    def finished(self) -> bool:
        return not self._left

    async def take(self) -> list[Delta]:
        """Wait for new tokens. Returns at most one delta per choice, which has all that is new since the last call."""
        deltas: dict[int, Delta] = {}
        while not deltas:
            await self._take(deltas)
        return list(deltas.values())

    async def collect(self) -> list[Delta]:
        """Wait until all choices are complete, and return them in order."""
        choices: dict[int, Delta] = {}
        while not self.finished:
            await self._take(choices)
        return [choices[index] for index in sorted(choices)]

    def close(self) -> None:
        """Abort the choices that are not finished."""
        self._engine.abort(self.job)

    async def _take(self, deltas: dict[int, Delta]) -> None:
        taken = await self.job.take()
        if self._prompts:  # tokens arrived, so the engine accepted the prompts
            self._metrics.prompts(self._prompts)
            self._prompts = ()
        if self._params.prompt_logprobs is not None:
            taken = self._with_scores(taken)
        for index, pieces in taken.items():
            self._add(index, pieces, deltas)

    def _with_scores(self, taken: dict[int, list[Piece]]) -> dict[int, list[Piece]]:
        """Return the tokens of those choices whose prompt's log-probabilities have arrived. Keep all other tokens for a
        later call.

        The engine sends the log-probabilities of a prompt when the first choice of that prompt begins.
        """
        for index, pieces in taken.items():
            self._held.setdefault(index, []).extend(pieces)
        known = [index for index in self._held if index // self._params.n in self.job.scores]
        return {index: self._held.pop(index) for index in known}

    def _add(self, index: int, pieces: list[Piece], deltas: dict[int, Delta]) -> None:
        transcript = self._transcripts[index]
        if transcript.finish_reason is not None:
            return  # the engine generated these tokens before it learned of the stop string
        if (delta := deltas.get(index)) is None:
            delta = deltas[index] = Delta(index, index // self._params.n)
        metrics, last_at, before = self._metrics, self._last_at[index], len(delta.tokens)
        for piece in pieces:
            delta.text += transcript.add(piece)
            delta.tokens.append(piece)
            at = piece.at
            if last_at:
                metrics.next_token(at - last_at)
            else:
                metrics.first_token(at - self.job.submitted_at)
            last_at = at
            if transcript.finish_reason is not None:
                delta.finish_reason = reason = _REASONS[transcript.finish_reason]
                assert reason is not None
                self._engine.stop(self.job, index)  # no effect if the engine has already ended the choice
                self._left -= 1
                metrics.finished(reason, at - self.job.submitted_at, len(transcript.token_ids))
                break
        self._last_at[index] = last_at
        self.completion_tokens += len(delta.tokens) - before
