"""POST /v1/messages and /v1/messages/count_tokens, which are Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from megakernel.serving.engine.sampling import StructuredOutputsParams
from megakernel.serving.engine.tokens import TokenIds
from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.http import event
from megakernel.serving.server.limits import MAX_MESSAGES, MAX_PARTS, MAX_STOPS
from megakernel.serving.server.replay import new_id
from megakernel.serving.server.routes import requests
from megakernel.serving.server.routes.chat import Tools
from megakernel.serving.server.routes.fields import IGNORED, OF_MESSAGES, Strict
from megakernel.serving.server.service import AnswerFormat, Service, encode_json
from megakernel.serving.text.tool_calls import Piece

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
    """Return text as the list of blocks for which it is a short form."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_BILLING = "x-anthropic-billing-header"
_Many = Field(max_length=MAX_PARTS)
Texts = Annotated[list[TextBlock], _Many, BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None


class ThinkingBlock(Strict):
    """Reasoning from an earlier answer. The model does not see it again."""

    type: Literal["thinking", "redacted_thinking"]


_TAGS = {kind: f"({kind})" for kind in ("text", "tool_use", "tool_result", "thinking")}
_TAGS["redacted_thinking"] = "(thinking)"


def _kind(given: Any) -> str:
    """Return the type of a content block. An unknown block counts as text, so that its validation fails."""
    kind = given.get("type") if isinstance(given, dict) else None
    return _TAGS.get(kind, "(text)") if isinstance(kind, str) else "(text)"


def _known(given: Any) -> Any:
    """Refuse a block of another type, such as an image, by name."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in _TAGS:
        why = f"a block of type {kind[:40]} is not supported: this server handles text and tools only"
        raise PydanticCustomError("refused", "{why}", {"why": why, "field": "type"})
    return given


Block = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")],
    Discriminator(_kind),
    BeforeValidator(_known),
]
Blocks = Annotated[list[Block], _Many, BeforeValidator(_blocks, json_schema_input_type=str | list[Block])]


def _text(blocks: list[Any] | None) -> str:
    return "".join(block.text for block in blocks or () if isinstance(block, TextBlock))


class MessagesTurn(Strict):
    where = "an entry of messages of /v1/messages"

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the turn as messages of /v1/chat/completions. Each result of a tool is a message of its own."""
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        text = _text(self.content)
        if text or calls or not messages:
            messages.append({"role": self.role, "content": text, "tool_calls": calls or None})
        return messages


class MessagesTool(Strict):
    """A tool that the client runs. Tools of other types, which Anthropic's servers run, are refused."""

    type: Literal["custom"] | None = None
    name: requests.FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    def chat_tool(self) -> requests.Tool:
        function = requests.Function(name=self.name, description=self.description, parameters=self.input_schema)
        return requests.Tool(type="function", function=function)


# Anthropic's values of `tool_choice` -> those of /v1/chat/completions.
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto", "any": "required"}


class MessagesToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: requests.FunctionName | None = None
    disable_parallel_tool_use: requests.Flag | None = None

    @model_validator(mode="after")
    def _tool_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise requests.contradiction("tool_choice.name", "tool_choice needs a name with type tool, and only there")
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """`effort` is ignored, because the supported models have no such setting."""

    format: OutputFormat | None = None


class CountRequest(requests.Body):
    where = "/v1/messages/count_tokens"
    ignored = IGNORED | OF_MESSAGES

    messages: Annotated[list[MessagesTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=requests.MOST_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="more variables for the template")] | None = None

    def chat_tools(self) -> Tools:
        """Return the tools and the tool choice, which have another form in /v1/chat/completions."""
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        named = MessagesTool(name=choice.name, input_schema={}).chat_tool() if choice.name else None
        tools = [tool.chat_tool() for tool in self.tools or ()]
        return Tools(tools, named or _CHOICES[choice.type], not choice.disable_parallel_tool_use)

    def conversation(self) -> requests.Conversation:
        """Return what a chat template reads. The answer continues the last turn if the assistant wrote it."""
        # Claude Code sends a block that differs with every request and would make the prefix cache useless.
        system = _text([block for block in self.system or () if not block.text.startswith(_BILLING)])
        said: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        said += [message for turn in self.messages for message in turn.chat_messages()]
        last = said[-1]
        goes_on = last["role"] == "assistant" and bool(last["content"].strip()) and not last["tool_calls"]
        try:
            return requests.Conversation.model_validate(
                {"messages": said, "continue_final_message": goes_on, "chat_template_kwargs": self.chat_template_kwargs}
            )
        except ValidationError as e:  # a limit that only the converted messages exceed
            raise RequestValidationError(e.errors()) from e


class MessagesRequest(CountRequest, requests.Sampled):
    where = "/v1/messages"

    max_tokens: requests.NewTokens
    stop_sequences: Annotated[list[requests.StopText], Field(max_length=MAX_STOPS)] | None = None

    @model_validator(mode="after")
    def _stop_has_one_name(self) -> Self:
        self.stop = self.stop or self.stop_sequences
        return self

    def structured(self) -> StructuredOutputsParams | None:
        wanted = self.output_config.format if self.output_config else None
        return StructuredOutputsParams(json=wanted.schema_) if wanted else None


# -- the answer


class MessagesUsage(BaseModel):
    """Token counts. `input_tokens` does not count the prompt tokens that were found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(BaseModel):
    input_tokens: int


async def count_tokens(service: Service, body: CountRequest) -> TokenCount:
    """Return the number of tokens of a conversation, tools included."""
    service.model(body.model)
    prompt = await service.encode_chat(body.conversation(), body.chat_tools().told)
    return TokenCount(input_tokens=len(prompt))


async def answer_messages(service: Service, body: MessagesRequest) -> Response:
    """Answer a request for a message. The response is the whole message, or an event stream that begins with the first
    token. If the prompt and `max_tokens` together exceed the context, `max_tokens` is reduced to what the prompt
    leaves."""
    model = service.model(body.model)
    tools = body.chat_tools()
    structured = tools.structured(body.structured(), service.codec)
    prompt = await service.encode_chat(body.conversation(), tools.told)
    prompt = service.truncated(prompt, body, body.max_tokens)
    service.room([prompt], None)
    params = body.sampling(
        service.description.sampling, min(body.max_tokens, service.max_context - len(prompt)), structured
    )
    answers = service.answers([prompt], params, special=tools.reader(service.codec) is not None)
    return await service.respond(answers, _Message(service, body, model, prompt, answers, tools), bool(body.stream))


class _Message(AnswerFormat):
    """An answer in Anthropic's format. `_content` has its blocks so far. In a stream, the last one may still grow."""

    last = b""  # empty, because the last event of an answer is message_stop

    def __init__(
        self, service: Service, body: MessagesRequest, model: str, prompt: TokenIds, answers: Answers, tools: Tools
    ) -> None:
        super().__init__(service, "msg", body, model, [prompt], answers)
        self._reader = tools.reader(service.codec)
        self._most = body.max_tokens
        self._content: list[dict[str, Any]] = []
        self._begun = False

    async def whole(self) -> bytes:
        [choice] = await self._answers.collect()
        self._add(choice.text, choice.finish_reason)
        for block in self._content:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        return self._answer(self._content, choice).model_dump_json().encode()

    def _event(self, delta: Delta) -> bytes:
        events = b""
        if not self._begun:
            self._begun = True
            events += _tell("message_start", message=self._answer([], None).model_dump()) + _tell("ping")
        events += self._add(delta.text, delta.finish_reason)
        if delta.finish_reason is not None:
            end = self._answer([], delta).model_dump()
            stop = {name: end[name] for name in ("stop_reason", "stop_sequence")}
            events += self._close() + _tell("message_delta", delta=stop, usage=end["usage"]) + _tell("message_stop")
        return events

    def _add(self, text: str, reason: str | None) -> bytes:
        """Append the new text and tool calls to the content blocks. Returns the stream events that report them."""
        pieces = [Piece("content", text)] if self._reader is None else self._reader.add(text, reason)
        return b"".join(self._append(piece) for piece in pieces if piece.text)

    def _append(self, piece: Piece) -> bytes:
        """Append a piece to the last content block, or to a new one if it belongs to no open block."""
        if piece.kind == "reasoning":
            return b""
        if piece.kind == "call":
            block = {"type": "tool_use", "id": f"toolu_{new_id()}", "name": piece.text, "input": {}}
            events = self._open(block)
            block["input"] = ""
            return events
        if piece.kind == "arguments":
            self._content[-1]["input"] += piece.text
            return self._change(type="input_json_delta", partial_json=piece.text)
        events = b""
        if not self._content or self._content[-1]["type"] != "text":
            events = self._open({"type": "text", "text": ""})
        self._content[-1]["text"] += piece.text
        return events + self._change(type="text_delta", text=piece.text)

    def _open(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._content.append(block)
        return events + _tell("content_block_start", index=len(self._content) - 1, content_block=block)

    def _change(self, **delta: str) -> bytes:
        return _tell("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close(self) -> bytes:
        return _tell("content_block_stop", index=len(self._content) - 1) if self._content else b""

    def _answer(self, content: list[dict[str, Any]], end: Delta | None) -> MessagesAnswer:
        """Return the answer with `content`. `end` is the last delta, or None while the answer is generated."""
        used = self._usage(self._answers.completion_tokens)
        cached = used.prompt_tokens_details.cached_tokens
        reason, sequence = self._stop(end) if end else (None, None)
        return MessagesAnswer(
            id=self._head["id"],
            model=self._head["model"],
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessagesUsage(
                input_tokens=used.prompt_tokens - cached,
                cache_read_input_tokens=cached,
                output_tokens=used.completion_tokens,
            ),
        )

    def _stop(self, end: Delta) -> tuple[str, str | None]:
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        if end.finish_reason == "length":
            made = self._answers.completion_tokens
            full = len(self._prompts[0]) + made == self._service.max_context and made < self._most
            return "model_context_window_exceeded" if full else "max_tokens", None
        return "tool_use" if self._reader is not None and self._reader.calls else "end_turn", None


def _tell(kind: str, **content: Any) -> bytes:
    return event(encode_json({"type": kind, **content}), kind)


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object. If the answer ended before the arguments did, it is empty."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
