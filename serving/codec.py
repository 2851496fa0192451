"""Between a model's token ids and text; models without a tokenizer have ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MegakernelError
from ..model.tokenizer import Tokenizer
from .sampling import SamplingParams
from .tool_calls import ToolFormat, tool_format, with_tools
from .transcript import Transcript


@dataclass
class Codec:
    """`model` is its name, for errors."""

    model: str
    tokenizer: Tokenizer | None
    tool_parser: str | None = None  # a name of FORMATS; None: what the chat template says

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise MegakernelError(f"{self.model} has no tokenizer: give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer, in which the model may call `tools`."""
        if self.tokenizer is None:
            raise MegakernelError(f"{self.model} has no tokenizer: give token ids instead of a conversation")
        told = [dict(message) for message in messages]
        if tools and "tools" not in (self.tokenizer.chat_template or ""):
            told, tools = with_tools(told, tools, self.tools), None
        return self.tokenizer.apply_chat_template(told, tools or None)

    @property
    def tools(self) -> ToolFormat:
        """How the model writes calls of functions."""
        return tool_format(self.tool_parser, self.tokenizer.chat_template if self.tokenizer else None)

    def check(self, params: SamplingParams) -> None:
        """Raise MegakernelError where only a tokenizer could do what is asked."""
        if params.stop_strings and self.tokenizer is None:
            raise MegakernelError("stop strings need a tokenizer, and this model has none: use stop_token_ids")

    def transcripts(self, params: SamplingParams, *, special: bool = False) -> list[Transcript]:
        """One for the reader of each choice; `special` tokens are in its text, or not."""
        tokenizer = self.tokenizer
        return [
            Transcript(params, tokenizer.stream(skip_special=not special) if tokenizer else None)
            for _ in range(params.n)
        ]
