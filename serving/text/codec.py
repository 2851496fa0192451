"""Converts conversations to token ids, and says how a model's answer is read: as text, as calls of tools, or by
channels. The engine handles token ids only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.model.tokenizer import Limit, Tokenizer, UnknownTokenizer
from megakernel.serving.engine.sampling import SamplingParams, StructuredOutputsParams
from megakernel.serving.server.client import Transcript
from megakernel.serving.text.channels import ChannelReader
from megakernel.serving.text.tool_calls import CallReader, Functions, Reader
from megakernel.serving.text.tool_formats import CallsGrammar, ToolFormat, tool_format, with_tools


@dataclass(frozen=True)
class Conversation:
    """A conversation whose next message the model writes. `messages` have the form that chat templates read: text as
    `content`, and the arguments of calls as objects."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call, in the OpenAI API's form
    values: Mapping[str, Any] = field(default_factory=dict)  # further variables for the template
    continue_final: bool = False  # whether the answer continues the last message
    add_special: bool = False


@dataclass
class Codec:
    """A model's tokenizer and tool call format. `model` is the name that errors show. A model without a tokenizer
    accepts and returns token ids only."""

    model: str
    tokenizer: Tokenizer | None
    tool_parser: str | None = None  # a key of FORMATS; None: the chat template decides
    why: str | None = None  # why there is no tokenizer, if the model has one that does not run here

    @classmethod
    def of(cls, model: str, source: str, tool_parser: str | None = None) -> Codec:
        """Return the codec of a model. `source` says where its tokenizer is, as for `load_tokenizer`."""
        try:
            return cls(model, load_tokenizer(source), tool_parser)
        except UnknownTokenizer as e:
            return cls(model, None, tool_parser, str(e))

    def need(self, remedy: str) -> Tokenizer:
        """Return the tokenizer. Raises MegakernelError with the remedy if there is none."""
        if self.tokenizer is None:
            raise MegakernelError(f"{self.why or f'{self.model} has no tokenizer'}: {remedy}")
        return self.tokenizer

    def chat_ids(self, asked: Conversation, limit: Limit | None = None) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins. `Tokenizer.encode` explains `limit`."""
        tokenizer = self.need("give token ids instead of a conversation")
        template = tokenizer.template(tools=bool(asked.tools))
        told = [dict(message) for message in asked.messages]
        if template is None or "developer" not in template.source:
            told = _for_system(told)
        if self.tools.final:  # this template calls reasoning `thinking`, and forbids it beside content
            told = [
                {**message, "thinking": message["reasoning_content"]}
                if message.get("reasoning_content") and not message.get("content")
                else message
                for message in told
            ]
        values = asked.values
        if asked.tools and not (template and template.takes_tools):
            told = with_tools(told, asked.tools, self.tools)
        elif asked.tools:
            values = {**values, "tools": list(asked.tools)}
        return tokenizer.apply_chat_template(
            told, values, continue_final=asked.continue_final, add_special=asked.add_special, limit=limit
        )

    @cached_property
    def tools(self) -> ToolFormat:
        """The format in which the model writes calls of functions."""
        template = self.tokenizer.template(tools=True) if self.tokenizer else None
        return tool_format(self.tool_parser, template.source if template else None)

    def reader(self, functions: Functions | None, most: int | None = None) -> Reader | None:
        """Return a parser for an answer's text, which must keep special tokens, or None if all text is content. It
        reads at most `most` calls. `functions` maps the functions that may be called to schemas of parameters."""
        if self.tools.final:
            return ChannelReader(functions or {}, most)
        return None if functions is None else CallReader(self.tools, functions, most)

    def constraint(
        self, functions: Functions | None, asked: StructuredOutputsParams | None, *, required: bool, several: bool
    ) -> StructuredOutputsParams | None:
        """Return the format of an answer in which the model may call `functions`, or must if `required` is set. With
        `several`, it may call more than once. `asked` is the format of an answer without calls.

        If nothing is asked for, the model writes text, and only the calls that it begins have a format. If a JSON
        schema is asked for, the answer consists of calls or matches the schema; a model with channels (see
        channels.py) must also write the header of the channel for answers. Raises MegakernelError if a call is required
        and the request also sets a format that is no JSON schema."""
        schema = asked.schema if asked else None
        if required and asked and schema is None:
            told = "a required tool call cannot be combined with a format that is not JSON: leave out one of them"
            raise MegakernelError(told)
        if self.tokenizer is None or (asked and schema is None) or not (functions or (schema and self.tools.final)):
            return asked
        grammar = CallsGrammar(functions or {}, self.tools, self.tokenizer, several=several)
        if required or schema:
            return StructuredOutputsParams(grammar=grammar.whole(None if required else schema))
        return StructuredOutputsParams(grammar=grammar.begun(), trigger=self.tools.trigger)

    def check(self, params: SamplingParams) -> None:
        """Raise MegakernelError if `params` need a tokenizer and the model has none."""
        if params.stop_strings and self.tokenizer is None:
            raise MegakernelError("stop strings need a tokenizer, and this model has none: use stop_token_ids")

    def transcripts(
        self, prompt: Iterable[int], params: SamplingParams, *, special: bool = False, keeps: bool = True
    ) -> list[Transcript]:
        """Return a new transcript for each choice (completion). With `special`, special tokens are kept,
        whatever `params` say. With `keeps`, log-probabilities are kept."""
        if (tokenizer := self.tokenizer) is None:
            return [Transcript(params, None, keeps) for _ in range(params.n)]
        skip = params.skip_special_tokens and not special
        shown = (token for token in prompt if tokenizer.token_bytes(token, skip_special=skip))
        begun = list(islice(shown, 1))  # looked for once, because a prompt may have many tokens without text
        return [Transcript(params, tokenizer.stream(skip_special=skip, after=begun), keeps) for _ in range(params.n)]


def _for_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn messages with the role "developer" into system messages, for a chat template that does not know this role.
    Consecutive system messages are joined, because most templates read only one."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    told: list[dict[str, Any]] = []
    for message in messages:
        system = message["role"] in ("system", "developer")
        if system and told and told[-1]["role"] == "system":
            told[-1]["content"] += f"\n\n{message['content']}"
        else:
            told.append({**message, "role": "system"} if system else message)
    return told
