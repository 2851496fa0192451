"""Converts text to token ids and back. A model without a tokenizer accepts and returns token ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.model.tokenizer import TextStream, Tokenizer
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.text.tool_calls import ToolFormat, tool_format, with_tools
from megakernel.serving.text.transcript import Transcript


@dataclass
class Codec:
    """A model's tokenizer and tool call format. `model` is the name that errors show."""

    model: str
    tokenizer: Tokenizer | None
    tool_parser: str | None = None  # a key of FORMATS; None: the chat template decides

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise MegakernelError(f"{self.model} has no tokenizer: give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **how: bool,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the point where the answer begins.

        The model may call `tools` in the answer. `values` and `how` are passed to `Tokenizer.apply_chat_template`.
        """
        if self.tokenizer is None:
            raise MegakernelError(f"{self.model} has no tokenizer: give token ids instead of a conversation")
        told = [dict(message) for message in messages]
        if tools and "tools" not in (self.tokenizer.chat_template or ""):
            told = with_tools(told, tools, self.tools)
        elif tools:
            values = {**(values or {}), "tools": list(tools)}
        return self.tokenizer.apply_chat_template(told, values, **how)

    @property
    def tools(self) -> ToolFormat:
        """The format in which the model writes calls of functions."""
        return tool_format(self.tool_parser, self.tokenizer.chat_template if self.tokenizer else None)

    def check(self, params: SamplingParams) -> None:
        """Raise MegakernelError if `params` need a tokenizer and the model has none."""
        if params.stop_strings and self.tokenizer is None:
            raise MegakernelError("stop strings need a tokenizer, and this model has none: use stop_token_ids")

    def transcripts(self, params: SamplingParams, *, special: bool = False) -> list[Transcript]:
        """Return one transcript per choice, which collects the choice's tokens and text.

        `special` keeps special tokens in the text, whatever `params` say.
        """
        return [Transcript(params, self._decoder(params, special)) for _ in range(params.n)]

    def _decoder(self, params: SamplingParams, special: bool) -> TextStream | None:
        skip = params.skip_special_tokens and not special
        return self.tokenizer.stream(skip_special=skip) if self.tokenizer else None
