"""POST /v1/messages and /v1/messages/count_tokens, which are Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi.responses import Response
from pydantic import BeforeValidator, Field, Tag, model_validator

from megakernel.serving.engine.sampling import StructuredOutputsParams
from megakernel.serving.server import client, fields, limits, requests, writer
from megakernel.serving.server.requests import Strict
from megakernel.serving.server.routes.chat import FunctionName, Mode, conversation, plain_call
from megakernel.serving.server.service import Served, Tools
from megakernel.serving.text.codec import Conversation

# -- the request. Blocks ignore fields that they do not declare, such as `cache_control`, `citations` and `is_error`.


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class ToolUseBlock(Strict):
    """A call of a tool from an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _blocks(content: Any) -> Any:
    """Return `content` as a list of blocks. In the API, a plain text is a short form of one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_BILLING = "x-anthropic-billing-header"
_Many = Field(max_length=limits.MAX_PARTS)
Texts = Annotated[list[TextBlock], _Many, BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None


class ThinkingBlock(Strict):
    """Reasoning from an earlier answer. The model does not see it again."""

    type: Literal["thinking", "redacted_thinking"]


_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Block = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[ThinkingBlock, Tag("(redacted_thinking)")],
    requests.by_type(_BLOCKS, "text"),
    requests.typed("a block", _BLOCKS),
]
Blocks = Annotated[list[Block], _Many, BeforeValidator(_blocks, json_schema_input_type=str | list[Block])]


def _text(blocks: list[Any] | None) -> str:
    return "".join(block.text for block in blocks or () if isinstance(block, TextBlock))


class MessagesTurn(Strict):
    where = "an entry of messages of /v1/messages"

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def plain(self) -> Iterator[dict[str, Any]]:
        """Yield the turn as messages that chat templates read. Each result of a tool becomes a separate message."""
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        for block in results:
            yield {"role": "tool", "content": _text(block.content), "tool_call_id": block.tool_use_id}
        text = _text(self.content)
        calls = [
            plain_call(block.id, block.name, block.input) for block in self.content if isinstance(block, ToolUseBlock)
        ]
        if text or calls or not results:
            yield {"role": self.role, "content": text, **({"tool_calls": calls} if calls else {})}


class MessagesTool(Strict):
    """A tool that the client runs. Tools of other types, which Anthropic's servers run, are refused."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    def told(self) -> dict[str, Any]:
        """Return the tool in the format of OpenAI's API, which is the format that chat templates read."""
        about = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.input_schema}}


# Anthropic's values of `tool_choice` -> those of /v1/chat/completions.
_CHOICES: dict[str, Mode] = {"none": "none", "auto": "auto", "any": "required"}


class MessagesToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: requests.Flag | None = None

    @model_validator(mode="after")
    def _tool_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise requests.contradiction("tool_choice.name", "tool_choice needs a name if, and only if, type is tool")
        return self

    def chosen(self) -> tuple[str, list[str] | None]:
        return _CHOICES.get(self.type, "named"), None if self.name is None else [self.name]


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """`effort` is ignored, because the supported models have no such setting."""

    format: OutputFormat | None = None


class CountRequest(requests.Body):
    where = "/v1/messages/count_tokens"
    ignored = fields.IGNORED | fields.OF_MESSAGES

    messages: Annotated[list[MessagesTurn], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: requests.TemplateValues | None = None

    def chosen(self) -> Tools:
        """Return the tools and the choice among them."""
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        return Tools([tool.told() for tool in self.tools or ()], choice, not choice.disable_parallel_tool_use)

    def conversation(self, tools: Tools) -> Conversation:
        """Return the request's conversation. The answer continues the last turn if the assistant wrote it."""
        # Claude Code sends a block that differs with every request and would make the prefix cache useless.
        system = _text([block for block in self.system or () if not block.text.startswith(_BILLING)])
        said: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        said += [message for turn in self.messages for message in turn.plain()]
        last = said[-1]
        goes_on = last["role"] == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last
        return conversation(said, "messages", tools, self.chat_template_kwargs or {}, continue_final=goes_on)


class MessagesRequest(CountRequest, requests.Sampled):
    where = "/v1/messages"

    max_tokens: requests.NewTokens
    stop_sequences: Annotated[list[requests.StopText], Field(max_length=limits.MAX_STOPS)] | None = None

    @model_validator(mode="after")
    def _stop_has_one_name(self) -> Self:
        self.stop = self.stop or self.stop_sequences
        return self

    def form(self) -> StructuredOutputsParams | None:
        wanted = self.output_config.format if self.output_config else None
        return StructuredOutputsParams(json=wanted.schema_) if wanted else None


# -- the answer


async def count_tokens(service: Served, body: CountRequest) -> Response:
    """Return the number of tokens of a conversation, tools included."""
    service.model(body.model)
    prompt = await service.encode_chat(body.conversation(body.chosen()))
    return writer.json_response({"input_tokens": len(prompt)})


async def answer_messages(service: Served, body: MessagesRequest) -> Response:
    """Answer a request for a message. The response is the whole message, or an event stream that begins with the first
    token. If the prompt and `max_tokens` together exceed the context, `max_tokens` is reduced to what the prompt
    leaves."""
    tools, write = body.chosen(), partial(_MessageWriter, service.max_context)
    return await service.converse(body, body.conversation(tools), tools, write, cut=True)


def _tell(kind: str, **content: Any) -> bytes:
    return writer.event(writer.encode_json({"type": kind, **content}), kind)


class _MessageWriter(writer.ItemWriter):
    kind = "msg"
    filler = _tell("ping")

    body: MessagesRequest

    def __init__(self, context: int, *given: Any) -> None:
        super().__init__(*given)
        self._room = context - self.answers.prompt_tokens

    def _whole(self, choices: list[writer.Said]) -> bytes:
        content = [_block(item, _object(item.text)) for item in self.said.items]
        return writer.encode_json(self._answer(content, end=True))

    def _begin(self) -> bytes:
        return _tell("message_start", message=self._answer([], end=False)) + _tell("ping")

    def _open(self, item: writer.Item) -> bytes:
        return self._about("start", content_block=_block(replace(item, text=""), {}))

    def _grow(self, item: writer.Item, text: str, delta: client.Delta) -> bytes:
        if item.kind == "call":
            return self._about("delta", delta={"type": "input_json_delta", "partial_json": text})
        return self._about("delta", delta={"type": "text_delta", "text": text})

    def _close(self, item: writer.Item) -> bytes:
        return _tell("content_block_stop", index=self.said.items.index(item))

    def _about(self, what: str, **content: Any) -> bytes:
        return _tell(f"content_block_{what}", index=len(self.said.items) - 1, **content)

    def _end(self) -> bytes:
        end = self._answer([], end=True)
        stop = {name: end[name] for name in ("stop_reason", "stop_sequence")}
        closed = b"".join(map(self._close, self.said.items[-1:]))
        return closed + _tell("message_delta", delta=stop, usage=end["usage"]) + _tell("message_stop")

    def _answer(self, content: list[dict[str, Any]], *, end: bool) -> dict[str, Any]:
        """Return the answer with `content`. `end` says that the answer is complete. `input_tokens` does not count the
        tokens that were found in the prefix cache."""
        used = self._usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        reason, sequence = self._stop() if end else (None, None)
        return {
            "id": self.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": used["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": used["completion_tokens"],
            },
        }

    def _stop(self) -> tuple[str, str | None]:
        end = self.said.last
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        if end.finish_reason == "length":
            made = self.answers.completion_tokens
            full = made == self._room and made < self.body.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        return "tool_use" if self.said.calls else "end_turn", None


def _block(item: writer.Item, arguments: dict[str, Any]) -> dict[str, Any]:
    if item.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{item.id}", "name": item.name, "input": arguments}
    return {"type": "text", "text": item.text}


def _object(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object, which is empty if the answer ended before they were complete."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
