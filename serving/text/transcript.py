"""Collects the tokens of a choice, converts them to text, and finds stop strings.

The engine handles token ids only. The readers of its results convert the ids to text outside the engine's thread, so a
slow reader never delays a step.
"""

from __future__ import annotations

from typing import Protocol

from megakernel.serving.engine.sampling import SamplingParams


class Decoder(Protocol):
    """The interface of `Tokenizer.stream()`. The text that it returns never ends inside a UTF-8 character."""

    def add(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Generated(Protocol):
    """A generated token. `top_logprobs` has the log-probabilities of the most likely ids, if they were requested."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top_logprobs(self) -> dict[int, float]: ...
    @property
    def finish_reason(self) -> str | None: ...


class Transcript:
    """Collects the tokens of one choice. `decoder` converts ids to text; without it `text` is None.

    `text` ends before the first stop string, or after it if the request asks for that. If the `finish_reason` of the
    transcript is `stop` but the last token has no finish reason, a stop string was found, and the caller must call
    `Engine.stop`. Tokens that arrive later are dropped. `stop_reason` is the stop string or the id of `stop_token_ids`
    that ended the choice, and None for other ends.
    """

    def __init__(self, params: SamplingParams, decoder: Decoder | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._min_tokens, self._stop = params.min_tokens, params.stop_strings
        self._stop_ids, self._keeps_end = params.stop_token_ids, params.include_stop_str_in_output
        self._decoder = decoder
        self._text = ""
        self._shown = 0  # number of characters of the text that `add` has returned

    @property
    def text(self) -> str | None:
        return self._text if self._decoder else None

    def add(self, token: Generated) -> str:
        """Append a token. Returns the new text, without an ending that may turn out to be part of a stop string.

        A stop token has no text, unless include_stop_str_in_output is set.
        """
        if self.finish_reason is not None:
            return ""
        self.token_ids.append(token.token_id)
        self.logprobs.append(token.logprob)
        self.top_logprobs.append(token.top_logprobs)
        self.finish_reason = token.finish_reason
        unseen = False  # whether the token has no text
        if token.finish_reason == "stop":
            unseen = not self._keeps_end
            self.stop_reason = token.token_id if token.token_id in self._stop_ids else None
        if self._decoder is None:
            return ""
        if not self._stop:
            piece = "" if unseen else self._decoder.add(token.token_id)
            if token.finish_reason is not None:
                piece += self._decoder.finish()
            self._text += piece
            return piece
        stopped = not unseen and self._append(self._decoder.add(token.token_id))
        if token.finish_reason is not None and not stopped:
            stopped = self._append(self._decoder.finish())  # the rest of the text, if its last character is incomplete
        if stopped:
            self.finish_reason = "stop"
        held = self._partial_stop() if self.finish_reason is None else 0
        before, self._shown = self._shown, max(self._shown, len(self._text) - held)
        return self._text[before : self._shown]

    def _append(self, piece: str) -> bool:
        """Append `piece` to the text. If the text now contains a stop string, end the text there and return True."""
        before = len(self._text)
        self._text += piece
        if len(self.token_ids) < self._min_tokens or not piece:
            return False
        found = [self._text.find(s, max(0, before - len(s) + 1)) for s in self._stop]
        starts = [(at, stop) for at, stop in zip(found, self._stop, strict=True) if at >= 0]
        if not starts:
            return False
        at, stop = min(starts)
        self._text = self._text[: at + len(stop) * self._keeps_end]
        self.stop_reason = stop
        return True

    def _partial_stop(self) -> int:
        """Return the length of the longest suffix of the text that is the beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0
