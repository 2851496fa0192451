"""Between a model's token ids and text; models without a tokenizer have ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MegakernelError
from ..model.tokenizer import TextStream, Tokenizer
from .sampling import SamplingParams
from .transcript import Transcript


@dataclass
class Codec:
    """`model` is its name, for errors."""

    model: str
    tokenizer: Tokenizer | None

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise MegakernelError(f"{self.model} has no tokenizer: give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None, **how: bool
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer. The rest is as `Tokenizer.apply_chat_template` has it."""
        if self.tokenizer is None:
            raise MegakernelError(f"{self.model} has no tokenizer: give token ids instead of a conversation")
        return self.tokenizer.apply_chat_template([dict(message) for message in messages], values, **how)

    def check(self, params: SamplingParams) -> None:
        """Raise MegakernelError where only a tokenizer could do what is asked."""
        if params.stop_strings and self.tokenizer is None:
            raise MegakernelError("stop strings need a tokenizer, and this model has none: use stop_token_ids")

    def transcripts(self, params: SamplingParams) -> list[Transcript]:
        """One for the reader of each choice."""
        return [Transcript(params, self._decoder(params)) for _ in range(params.n)]

    def _decoder(self, params: SamplingParams) -> TextStream | None:
        return self.tokenizer.stream(skip_special=params.skip_special_tokens) if self.tokenizer else None
