"""What the reader of a choice has of it: ids, scores, text, and where a stop string ends it.

The engine knows ids only. Readers make text of them where and when they like, so a slow one never holds up a step.
"""

from __future__ import annotations

from .engine import Token
from .sampling import SamplingParams
from .text import Decoder, TextStream


class Transcript:
    """Collects the tokens of one choice. `decoder` detokenises; None: ids only, and `text` is None.

    Where `finish_reason` says `stop` though no token did, a stop string came: tell the engine by `Engine.stop`. Tokens
    after that are dropped.
    """

    def __init__(self, params: SamplingParams, decoder: Decoder | None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self._min_tokens = params.min_tokens
        self._stream = TextStream(decoder, params.stop_strings) if decoder else None

    @property
    def text(self) -> str | None:
        return self._stream.text if self._stream else None

    def add(self, token: Token) -> str:
        """Append a token: the text that became certain with it. The token of reason `stop` has no text."""
        if self.finish_reason is not None:
            return ""
        self.token_ids.append(token.token_id)
        self.logprobs.append(token.logprob)
        self.top_logprobs.append(token.top_logprobs)
        self.finish_reason = token.finish_reason
        stream = self._stream
        if stream is None:
            return ""
        search = len(self.token_ids) >= self._min_tokens
        if self.finish_reason != "stop":
            stream.add(token.token_id, search)
        if stream.stopped:
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            stream.finish(search)
            if stream.stopped:
                self.finish_reason = "stop"
        return stream.take(final=self.finish_reason is not None)
