"""Converts text to token ids and back, and finds stop strings. The engine handles token ids only. Its results become
text outside of its thread, so the conversion never delays a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec

from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.model.tokenizer import Limit, TextStream, Tokenizer, UnknownTokenizer
from megakernel.serving.engine.sampling import FINISH, SamplingParams, StructuredOutputsParams, Tokens
from megakernel.serving.text.channels import ChannelReader
from megakernel.serving.text.tool_calls import CallReader, Functions, Reader, beginning
from megakernel.serving.text.tool_formats import CallsGrammar, ToolFormat, tool_format, with_tools

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


def single_tokens(tokens: Tokens) -> Iterator[Token]:
    """Yield the tokens of a step."""
    columns = (tokens.choice, tokens.token_id, tokens.logprob, tokens.finish)
    top, at = tokens.top, tokens.at
    for i, (choice, token, logprob, finish) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        yield Token(choice, token, logprob, top.get(i, _NO_TOP), FINISH[finish], at)


class Transcript:
    """Collects the tokens of one choice (completion) and their text. `decoder` converts ids to text; without it `text`
    is None. `keeps` says whether log-probabilities are collected too.

    `text` ends before the first stop string, or after it if the request asks for that. If the `finish_reason` of the
    transcript is `stop` but the last token has no finish reason, a stop string was found. The caller must then call
    `Engine.stop`. Tokens that arrive later are dropped."""

    def __init__(self, params: SamplingParams, decoder: TextStream | None, keeps: bool = True) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or the id of `stop_token_ids` at the end, if any
        self.first_at = self.last_at = 0.0  # times of the first and the last token, 0 before the first
        self._min_tokens, self._matchers = params.min_tokens, [_Matcher(stop) for stop in params.stop_strings]
        self._stop_ids, self._keeps_end = params.stop_token_ids, params.include_stop_str_in_output
        self._decoder, self._keeps = decoder, keeps
        self._text = ""
        self._shown = 0  # number of characters of the text that `add` has returned so far

    @property
    def text(self) -> str | None:
        return self._text if self._decoder else None

    def add(self, token: Token) -> str:
        """Append a token. Returns the new text, without an ending that may turn out to be part of a stop string. A stop
        token has no text, unless include_stop_str_in_output is set."""
        if self.finish_reason is not None:
            return ""
        self.token_ids.append(token.token_id)
        if self._keeps:
            self.logprobs.append(token.logprob)
            self.top_logprobs.append(token.top_logprobs)
        self.first_at, self.last_at = self.first_at or token.at, token.at
        self.finish_reason = token.finish_reason
        unseen = False  # whether this token adds nothing to the text
        if token.finish_reason == "stop":
            unseen = not self._keeps_end
            self.stop_reason = token.token_id if token.token_id in self._stop_ids else None
        if self._decoder is None:
            return ""
        piece = "" if unseen else self._decoder.add(token.token_id)
        if token.finish_reason is not None:
            piece += self._decoder.finish()  # the rest of the text, if its last character is incomplete
        if not self._matchers:
            self._text += piece
            return piece
        if self._append(piece):
            self.finish_reason = "stop"
        held = max(one.matched for one in self._matchers) if self.finish_reason is None else 0
        before, self._shown = self._shown, max(self._shown, len(self._text) - held)
        return self._text[before : self._shown]

    def _append(self, piece: str) -> bool:
        """Append `piece` to the text. If the text now contains a stop string, end the text there and return True."""
        self._text += piece
        found = [(one.read(self._text, len(piece)), one.stop) for one in self._matchers]
        ends = [end for end in found if end[0] >= 0]
        if not ends or len(self.token_ids) < self._min_tokens:
            return False
        at, stop = min(ends)
        self._text = self._text[: at + len(stop) * self._keeps_end]
        self.stop_reason = stop
        return True


class _Matcher:
    """Finds a stop string in a text that grows. `matched` is the length of the longest suffix of the text that is a
    proper prefix of `stop`."""

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0

    def read(self, text: str, new: int) -> int:
        """Read a text whose last `new` characters are new. Returns the position of the first stop string that ends in
        the new characters, or -1. The number of comparisons does not grow with the stop string, because `matched` grows
        by at most `new`."""
        self.matched = beginning(text, self.stop, self.matched + new)
        return text.find(self.stop, max(0, len(text) - new - len(self.stop) + 1))


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
