"""POST /v1/chat/completions: the body, the conversation that it describes, and the answer."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any, Literal, Self

from fastapi.responses import Response
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from megakernel.serving.server import client, errors, fields, limits, requests, writer
from megakernel.serving.server.requests import Strict
from megakernel.serving.server.service import Served, Tools
from megakernel.serving.text.codec import Conversation
from megakernel.serving.text.tool_calls import Piece

# -- the request

_HOSTED = re.compile(f"({fields.HOSTED_TOOLS})(_[0-9_]+)?")


def _callable(tools: Any) -> Any:
    """Return the tools without those that only another server can run."""
    if not isinstance(tools, list):
        return tools
    return [t for t in tools if not (isinstance(t, dict) and _HOSTED.fullmatch(str(t.get("type"))[:64]))]


CALLABLE = BeforeValidator(_callable)
Mode = Literal["none", "auto", "required"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: requests.Flag | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def chosen(self) -> tuple[str, list[str]]:
        return "named", [self.function.name]


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Field(min_length=1, max_length=limits.MAX_TOOLS)]


class AllowedChoice(Strict):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def chosen(self) -> tuple[str, list[str]]:
        return self.allowed_tools.mode, [tool.function.name for tool in self.allowed_tools.tools]


# A call's arguments: JSON text, incomplete if the answer was cut. Clients of other APIs send an object.
Arguments = Annotated[str | dict[str, Any], requests.one_message("must be JSON text or an object")]


class CalledFunction(Strict):
    name: str
    arguments: Arguments | None = None


def plain_call(name: str | None, function: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the call with the id `name` in the form that chat templates read: the arguments are an object if they are
    JSON that UTF-8 can represent."""
    value: Any = arguments or "{}"
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(value) if isinstance(value, str) else value
        json.dumps(parsed, ensure_ascii=False).encode()
        value = parsed
    return {"id": name, "type": "function", "function": {"name": function, "arguments": value}}


class Called(Strict):
    """A tool call from an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        return plain_call(self.id, self.function.name, self.function.arguments)


class TextPart(Strict):
    """A part of a content. The first two types are those of /v1/responses."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = list[Annotated[TextPart, requests.typed("a part", ["input_text", "output_text", "text"])]]
Content = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[Parts, Field(max_length=limits.MAX_PARTS, fail_fast=True), Tag("(parts)")],
    requests.TEXT_OR_PARTS,
]


def plain_text(content: str | list[TextPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


class Message(Strict):
    where = "an entry of messages"
    ignored = fields.OF_EARLIER_ANSWERS
    lenient = True

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: Annotated[str, Field(description="read as content")] | None = None
    tool_calls: Annotated[list[Called], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[str, Field(description="the reasoning of an earlier answer")] | None = None
    reasoning: Annotated[str, Field(description="the same as reasoning_content")] | None = None
    thinking: Annotated[str, Field(description="the same as reasoning_content")] | None = None
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        text = plain_text(self.content or self.refusal)
        more: dict[str, Any] = {"tool_call_id": self.tool_call_id, "name": self.name}
        more["reasoning_content"] = self.reasoning_content or self.reasoning or self.thinking or None
        if self.tool_calls:
            more["tool_calls"] = [call.plain() for call in self.tool_calls]
        return {"role": self.role, "content": text} | {key: value for key, value in more.items() if value is not None}


TOOL_CHOICE = requests.one_message(
    'must be "none", "auto", "required" or an object with type "function" or "allowed_tools"'
)
Messages = Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]


class Reasoning(Strict):
    where = "reasoning"
    ignored = fields.OF_REASONING

    effort: str | None = None


class Templated(Strict):
    """A conversation, and how the model's chat template turns it into a prompt."""

    messages: Messages
    add_generation_prompt: Annotated[requests.Flag, Field(description="begin a new answer; usually true")] | None = None
    continue_final_message: Annotated[requests.Flag, Field(description="continue the last message")] | None = None
    chat_template_kwargs: requests.TemplateValues | None = None
    reasoning_effort: Annotated[str, Field(description="a variable for the template; none: no thinking")] | None = None
    reasoning: Annotated[Reasoning, Field(description="reasoning.effort is reasoning_effort")] | None = None
    add_special_tokens: requests.AddSpecial | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS), CALLABLE] | None = None

    @model_validator(mode="after")
    def _prompt_has_one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            told = "continue_final_message and add_generation_prompt exclude each other"
            raise requests.contradiction("continue_final_message", told)
        return self

    def conversation(self) -> Conversation:
        values = reasoning_values(self.reasoning_effort, self.reasoning)
        if self.add_generation_prompt is not None:
            values["add_generation_prompt"] = self.add_generation_prompt
        return Conversation(
            [message.plain() for message in self.messages],
            [tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            values=values | (self.chat_template_kwargs or {}),
            continue_final=bool(self.continue_final_message),
            add_special=bool(self.add_special_tokens),
        )


def conversation(
    said: list[dict[str, Any]], field: str, tools: Tools, values: dict[str, Any], *, continue_final: bool = False
) -> Conversation:
    """Return the conversation of a request of another API. `said` has its messages, converted to the chat API's form.
    `field` is the name of their request field, for errors. Raises an HTTP error 400 if they exceed a limit."""
    if len(said) > limits.MAX_MESSAGES:
        raise errors.APIError(400, f"{field} may have at most {limits.MAX_MESSAGES} entries", param=field)
    if any(len(message.get("tool_calls", ())) > limits.MAX_TOOLS for message in said):
        raise errors.APIError(400, f"one turn in {field} may have at most {limits.MAX_TOOLS} tool calls", param=field)
    return Conversation(said, tools.told, values, continue_final)


def reasoning_values(effort: str | None, reasoning: Reasoning | None) -> dict[str, Any]:
    """Return the variables by which chat templates know how much to reason."""
    effort = effort or (reasoning.effort if reasoning else None)
    if not effort:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


class ChatRequest(Templated, requests.Choices):
    where = "/v1/chat/completions"

    max_completion_tokens: requests.NewTokens | None = None
    max_tokens: requests.NewTokens | None = None  # the older name of max_completion_tokens
    logprobs: requests.Flag | None = None
    top_logprobs: requests.TopCount | None = None
    echo: Annotated[requests.Flag, Field(description="repeat the last message if the assistant wrote it")] | None = None
    tool_choice: Annotated[Mode | Tool | AllowedChoice | None, TOOL_CHOICE] = None
    parallel_tool_calls: requests.Flag | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise requests.contradiction("top_logprobs", "top_logprobs requires logprobs=true")
        return self

    @property
    def shown(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeMessages(Templated, requests.Body):
    where = "/tokenize with messages"


def _which(given: Any) -> str:
    return "(messages)" if isinstance(given, dict) and given.get("messages") is not None else "(text)"


# The tags are in parentheses, so that errors.py can recognise them and leave them out of the path of an invalid field.
TokenizeRequest = Annotated[
    Annotated[requests.TokenizeText, Tag("(text)")] | Annotated[TokenizeMessages, Tag("(messages)")],
    Discriminator(_which),
]


# -- the answer


async def chat(service: Served, body: ChatRequest) -> Response:
    """Answer a conversation with the whole answer, or with a stream that begins when the first token exists."""
    asked = body.conversation()
    tools = Tools([dict(tool) for tool in asked.tools], body.tool_choice, body.parallel_tool_calls)
    return await service.converse(body, asked, tools, _ChatWriter)


class _ChatWriter(writer.Writer):
    kind, objects = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    body: ChatRequest

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        last = self.body.messages[-1]
        self._before = last.plain()["content"] if self.body.echo and last.role == "assistant" else ""

    def _whole(self, choices: list[writer.Said]) -> bytes:
        shown = [
            {
                "index": said.index,
                "message": self._message(said),
                "logprobs": self._written(said.scores) or None,
                "finish_reason": said.reason or "length",
                "stop_reason": said.last.stop_reason,
                "token_ids": self.answers.transcripts[said.index].token_ids if self._shows_ids else None,
            }
            for said in choices
        ]
        ids = self.answers.prompts[0].tolist() if self._shows_ids else None
        scores = self._written(self._prompts.get(0, {})).get("prompt")
        return self._json(shown, self._usage(), whole=True, prompt_token_ids=ids, prompt_logprobs=scores)

    def _message(self, said: writer.Said) -> dict[str, Any]:
        text, reasoning = self._before + said.text("content"), said.text("reasoning")
        calls = [
            {"id": f"call_{item.id}", "type": "function", "function": {"name": item.name, "arguments": item.text}}
            for item in said.items
            if item.kind == "call"
        ]
        told = {"role": "assistant", "content": (text or None) if calls else text, "tool_calls": calls or None}
        return told | ({"reasoning_content": reasoning} if reasoning else {})

    def _events(self, delta: client.Delta) -> bytes:
        """Return the events for new tokens of a choice. The first event of each choice contains the role and, with
        `echo`, the text of the last assistant message. There is no event for new text that may still turn out to be
        part of a tool call. Many clients read only one call per event, so each piece of a call is an event."""
        index, first = delta.index, delta.index not in self._said
        said, begin = self._choice(delta), b""
        if first:
            begin = self._event(index, {"role": "assistant", "content": self._before})
        if said.reader is None and delta.finish_reason is None and not self._keeps:
            return begin + self._text_event(index, delta.text)
        deltas = [self._delta(said, piece) for piece in said.read(delta)]
        last = deltas.pop() if deltas else {}
        new = {
            "logprobs": self._lists(delta) or None,
            "finish_reason": said.reason,
            "stop_reason": delta.stop_reason,
            "token_ids": [token.token_id for token in delta.tokens] if self._shows_ids else None,
        }
        events = [self._event(index, one) for one in deltas]
        if last or new["finish_reason"] or self._keeps:
            events.append(self._event(index, last, **new))
        return begin + b"".join(events)

    @staticmethod
    def _delta(said: writer.Said, piece: Piece) -> dict[str, Any]:
        """Return a piece of an answer as the `delta` of an event. No field is null, because some clients let null
        replace earlier text. A call begins with its id and name. Pieces of its arguments follow."""
        said.put(piece)
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {"reasoning_content": piece.text}
        call: dict[str, Any] = {"index": said.calls - 1, "function": {"arguments": piece.text}}
        if piece.kind == "call":
            call |= {"id": f"call_{said.items[-1].id}", "type": "function"}
            call["function"] = {"name": piece.text, "arguments": ""}
        return {"tool_calls": [call]}

    def _event(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        return writer.event(self._json([_chunk_choice(index, delta) | more]))

    def _plain(self, index: int, text: str) -> dict[str, Any]:
        return _chunk_choice(index, {"content": text})


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    """Return a choice for a stream event that has nothing but `delta`: its four other fields are null."""
    empty = dict.fromkeys(("logprobs", "finish_reason", "stop_reason", "token_ids"))
    return {"index": index, "delta": delta, **empty}
