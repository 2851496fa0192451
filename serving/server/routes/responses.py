"""POST /v1/responses: answers a conversation. Nothing is stored, so each request contains the whole conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag

from megakernel.serving.engine.sampling import StructuredOutputsParams
from megakernel.serving.server import client, errors, fields, limits, requests, scores, writer
from megakernel.serving.server.requests import Strict
from megakernel.serving.server.routes import chat
from megakernel.serving.server.service import Served, Tools
from megakernel.serving.text.codec import Conversation
from megakernel.serving.text.tool_calls import Piece

# -- the request


class _Item(Strict):
    ignored = fields.OF_EARLIER_ANSWERS
    lenient = True


class InputMessage(_Item):
    where = "an input item of type message"

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: chat.Content


class InputCall(_Item):
    """A function call from an earlier answer."""

    where = "an input item of type function_call"

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: chat.Arguments | None = None


class InputResult(_Item):
    """The result of a function call."""

    where = "an input item of type function_call_output"

    type: Literal["function_call_output"]
    call_id: str
    output: chat.Content


class InputReasoning(Strict):
    """The reasoning before an earlier answer. It is left out, because chat templates leave it out too."""

    type: Literal["reasoning"]


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_WHY = {"item_reference": "this server stores nothing: send the item itself"}
InputItem = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputCall, Tag("(function_call)")]
    | Annotated[InputResult, Tag("(function_call_output)")]
    | Annotated[InputReasoning, Tag("(reasoning)")],
    requests.by_type(_ITEMS, "message"),
    requests.typed("an item", _ITEMS, _WHY),
]


class TextFormat(requests.JsonSchema):
    """The format of the answer's text. The answer always follows the schema, even if `strict` is false."""

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Strict):
    where = "text"
    ignored = fields.OF_TEXT

    format: TextFormat | None = None


class ResponseTool(Strict):
    type: Literal["function"]
    name: chat.FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: requests.Flag | None = None

    def chosen(self) -> tuple[str, list[str]]:
        return "named", [self.name]


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseTool], Field(min_length=1, max_length=limits.MAX_TOOLS)]

    def chosen(self) -> tuple[str, list[str]]:
        return self.mode, [tool.name for tool in self.tools]


_LOGPROBS = "message.output_text.logprobs"
# In the field `include`, only log-probabilities are supported. What else the API allows belongs to tools of OpenAI's
# servers, so it changes no answer here.
Addition = Annotated[
    str, Field(pattern=rf"^{_LOGPROBS}$|^message\.input_|^(reasoning|(file|web)_search|code_interpreter|computer)\w*\.")
]


class ResponsesRequest(requests.Sampled):
    where = "/v1/responses"

    input: Annotated[
        Annotated[requests.Text, Tag("(text)")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=limits.MAX_MESSAGES - 1), Tag("(items)")],
        Discriminator(lambda given: "(items)" if isinstance(given, list) else "(text)"),
    ]
    instructions: Annotated[str, Field(description="a system message before the conversation")] | None = None
    max_output_tokens: requests.NewTokens | None = None
    top_logprobs: requests.TopCount | None = None
    include: list[Addition] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=limits.MAX_TOOLS), chat.CALLABLE] | None = None
    tool_choice: Annotated[chat.Mode | ResponseTool | AllowedChoice | None, chat.TOOL_CHOICE] = None
    parallel_tool_calls: requests.Flag | None = None
    reasoning: chat.Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(description="returned unchanged with the answer")] | None = None

    @property
    def shown(self) -> int | None:
        return self.top_logprobs or (0 if _LOGPROBS in (self.include or ()) else None)

    def form(self) -> StructuredOutputsParams | None:
        wanted = self.text.format if self.text else None
        return requests.form_of(wanted.type, wanted.schema_, "text.format.schema") if wanted else None

    def chosen(self) -> Tools:
        """Return the tools in the form of /v1/chat/completions, and the choice among them."""
        told = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        return Tools(told, self.tool_choice, self.parallel_tool_calls)

    def conversation(self, tools: Tools) -> Conversation:
        """Return the input items as the conversation that a chat template reads. A function call is added to the
        assistant message that precedes it, or to a new assistant message if none precedes it."""
        said: list[dict[str, Any]] = []
        if self.instructions:
            said.append({"role": "system", "content": self.instructions})
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputMessage):
                said.append({"role": item.role, "content": chat.plain_text(item.content)})
            elif isinstance(item, InputResult):
                said.append({"role": "tool", "content": chat.plain_text(item.output), "tool_call_id": item.call_id})
            elif isinstance(item, InputCall):
                last = said[-1] if said else {}
                if last.get("role") != "assistant" or len(last.get("tool_calls", ())) == limits.MAX_TOOLS:
                    said.append({"role": "assistant", "content": ""})
                call = chat.plain_call(item.call_id, item.name, item.arguments)
                said[-1].setdefault("tool_calls", []).append(call)
        if not said:
            raise errors.APIError(
                400, "input must have a message, function_call or function_call_output", param="input"
            )
        return chat.conversation(said, "input", tools, chat.reasoning_values(None, self.reasoning))


# -- the answer

Status = Literal["in_progress", "completed", "incomplete"]


# Fields of the response object that never change, and fields of the request that it repeats as they are.
_ALWAYS = {"error": None, "previous_response_id": None, "store": False, "background": False, "truncation": "disabled"}
_REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs")


async def respond(service: Served, body: ResponsesRequest) -> Response:
    """Answer a request with the whole response, or with a stream that begins when the first token exists."""
    tools = body.chosen()
    if service.codec.reader(tools.functions) is not None and body.shown is not None:
        cause = "tools" if tools.functions else "a model that writes its reasoning in channels"
        told = f"log-probabilities cannot be combined with {cause}: leave out top_logprobs and {_LOGPROBS}"
        raise errors.APIError(400, told)
    return await service.converse(body, body.conversation(tools), tools, _ResponseWriter)


class _ResponseWriter(writer.ItemWriter):
    kind = "resp"
    body: ResponsesRequest

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._next = 0  # number of the next event
        self._scores: scores.Pieces = {}

    def _whole(self, choices: list[writer.Said]) -> bytes:
        self._scores = self.said.scores
        if not self.said.items:
            self.said.put(Piece("content", ""))
        return writer.encode_json(self._response(self.said.last.finish_reason))

    def _begin(self) -> bytes:
        response = self._response(None)
        events = self._event("created", response=response) + self._event("in_progress", response=response)
        if self.said.reader is None:
            events += self._empty()
        return events

    def _empty(self) -> bytes:
        """Return the events that open a message without text."""
        self.said.put(Piece("content", ""))
        return self._open(self.said.items[-1])

    def _open(self, item: writer.Item) -> bytes:
        begun = self._item(replace(item, text=""), "in_progress")
        if item.kind != "call":
            begun["content"] = []
        events = self._event("output_item.added", output_index=self.said.items.index(item), item=begun)
        if item.kind == "call":
            return events
        return events + self._tell(item, "content_part.added", content_index=0, part=_part("", None))

    def _grow(self, item: writer.Item, text: str, delta: client.Delta) -> bytes:
        if item.kind == "call":
            return self._tell(item, "function_call_arguments.delta", delta=text)
        new = self._lists(delta)
        scores.append(self._scores, new)
        return self._tell(item, "output_text.delta", content_index=0, delta=text, logprobs=new.get("content", []))

    def _close(self, item: writer.Item, status: Status = "completed") -> bytes:
        done = self._item(item, status)
        if item.kind == "call":
            events = self._tell(item, "function_call_arguments.done", name=item.name, arguments=item.text)
        else:
            [part] = done["content"]
            events = self._tell(
                item, "output_text.done", content_index=0, text=item.text, logprobs=part["logprobs"] or []
            )
            events += self._tell(item, "content_part.done", content_index=0, part=part)
        return events + self._event("output_item.done", output_index=self.said.items.index(item), item=done)

    def _end(self) -> bytes:
        reason = self.said.last.finish_reason
        events = b"" if self.said.items else self._empty()
        events += self._close(self.said.items[-1], _status(reason))
        response = self._response(reason)
        return events + self._event(response["status"], response=response)

    def _event(self, kind: str, **content: Any) -> bytes:
        name = f"response.{kind}"
        data = writer.encode_json({"type": name, "sequence_number": self._next, **content})
        self._next += 1
        return writer.event(data, name)

    def _tell(self, item: writer.Item, kind: str, **content: Any) -> bytes:
        return self._event(kind, item_id=_id(item), output_index=self.said.items.index(item), **content)

    def _item(self, item: writer.Item, status: Status) -> dict[str, Any]:
        if item.kind == "call":
            call = {"call_id": f"call_{item.id}", "name": item.name, "arguments": item.text}
            return {"id": _id(item), "type": "function_call", "status": status, **call}
        part = _part(item.text, None if self.body.shown is None else self._written(self._scores).get("content", []))
        return {"id": _id(item), "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _response(self, reason: client.FinishReason | None) -> dict[str, Any]:
        """Return the response object so far: the request's parameters and the answer. `reason` is None while the answer
        is generated."""
        body, usage = self.body, None
        output: list[dict[str, Any]] = []
        if reason is not None:
            used = self._usage()
            usage = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            }
            output = [self._item(item, "completed") for item in self.said.items]
            output[-1]["status"] = _status(reason)
        choice = body.tool_choice or "auto"
        form = body.text.format if body.text else None
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": "in_progress" if reason is None else _status(reason),
            "model": self.head["model"],
            "output": output,
            "usage": usage,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            **{name: getattr(body, name) for name in _REPEATED},
            "metadata": body.metadata or {},
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            **_ALWAYS,
        }


def _part(text: str, logprobs: Any) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _id(item: writer.Item) -> str:
    return f"fc_{item.id}" if item.kind == "call" else f"msg_{item.id}"


def _status(reason: client.FinishReason | None) -> Status:
    return "completed" if reason == "stop" else "incomplete"
