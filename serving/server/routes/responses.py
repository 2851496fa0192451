"""POST /v1/responses: answers a conversation. Nothing is stored, so each request contains the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel, Discriminator, Field, Tag

from megakernel.serving.engine.sampling import StructuredOutputsParams
from megakernel.serving.engine.tokens import TokenIds
from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.http import event
from megakernel.serving.server.limits import MAX_MESSAGES, MAX_PARTS
from megakernel.serving.server.replay import new_id
from megakernel.serving.server.routes import bodies, requests
from megakernel.serving.server.routes.chat import Tools, call_id
from megakernel.serving.server.routes.fields import OF_EARLIER_ANSWERS, OF_TEXT, Strict
from megakernel.serving.server.service import AnswerFormat, Service, encode_json
from megakernel.serving.text.tool_calls import Piece

# -- the request


class InputPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


Content = Annotated[
    str | Annotated[list[InputPart], Field(max_length=MAX_PARTS)],
    requests.one_message(f'must be text or a list of up to {MAX_PARTS} parts {{"type": "input_text", "text": ...}}'),
]


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class InputMessage(Strict):
    where = "an input item of type message"
    ignored = OF_EARLIER_ANSWERS
    lenient = True

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Strict):
    """A function call from an earlier answer."""

    where = "an input item of type function_call"
    ignored = OF_EARLIER_ANSWERS
    lenient = True

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: requests.Arguments | None = None


class InputResult(Strict):
    """The result of a function call."""

    where = "an input item of type function_call_output"
    ignored = OF_EARLIER_ANSWERS
    lenient = True

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class InputReasoning(Strict):
    """The reasoning before an earlier answer. It is left out, because chat templates leave it out too."""

    type: Literal["reasoning"]


def _kind(given: Any) -> str:
    """Return the type of an input item. An unknown type counts as a message, so that its validation fails."""
    kind = given.get("type") if isinstance(given, dict) else None
    return f"({kind})" if kind in ("function_call", "function_call_output", "reasoning") else "(message)"


Item = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputCall, Tag("(function_call)")]
    | Annotated[InputResult, Tag("(function_call_output)")]
    | Annotated[InputReasoning, Tag("(reasoning)")],
    Discriminator(_kind),
]


class TextFormat(requests.JsonSchema):
    """The format of the answer's text. The answer always follows the schema, even if `strict` is false."""

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Strict):
    where = "text"
    ignored = OF_TEXT

    format: TextFormat | None = None


class ResponseTool(Strict):
    type: Literal["function"]
    name: requests.FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: requests.Flag | None = None


_LOGPROBS = "message.output_text.logprobs"
# Values of the field `include`. Only log-probabilities are supported; the others belong to tools of OpenAI's servers.
Addition = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
_TOLD = requests.one_message('must be "none", "auto", "required" or {"type": "function", "name": ...}')


class ResponsesRequest(requests.Sampled):
    where = "/v1/responses"

    input: Annotated[
        Annotated[requests.Text, Tag("(text)")]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES - 1), Tag("(items)")],
        Discriminator(lambda given: "(items)" if isinstance(given, list) else "(text)"),
    ]
    instructions: Annotated[str, Field(description="a system message before the conversation")] | None = None
    max_output_tokens: requests.NewTokens | None = None
    top_logprobs: requests.TopCount | None = None
    include: list[Addition] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=requests.MOST_TOOLS), requests.CALLABLE] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ResponseTool | None, _TOLD] = None
    parallel_tool_calls: requests.Flag | None = None
    reasoning: requests.Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(description="returned unchanged with the answer")] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def structured(self) -> StructuredOutputsParams | None:
        """Return the format that the answer's text must match, or None. Raises a 400 if the schema is missing."""
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if wanted.schema_ is None:
            raise APIError(400, "text.format.schema is required", param="text.format.schema")
        return StructuredOutputsParams(json=wanted.schema_)

    def chat_tools(self) -> Tools:
        """Return the tools and the tool choice, which have another form in /v1/chat/completions."""
        choice = self.tool_choice
        return Tools(
            [_chat_tool(tool) for tool in self.tools or ()],
            _chat_tool(choice) if isinstance(choice, ResponseTool) else choice,
            self.parallel_tool_calls,
        )

    def conversation(self) -> requests.Conversation:
        """Return the input items as the conversation that a chat template reads. A function call is added to the
        assistant message that precedes it, or to a new assistant message if none precedes it."""
        said: list[dict[str, Any]] = []
        if self.instructions:
            said.append({"role": "system", "content": self.instructions})
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputMessage):
                said.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, InputResult):
                said.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            elif isinstance(item, InputCall):
                last = said[-1] if said else {}
                if last.get("role") != "assistant" or len(last.get("tool_calls", ())) == requests.MOST_TOOLS:
                    said.append({"role": "assistant", "content": ""})
                called = {"name": item.name, "arguments": item.arguments}
                said[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": called})
        if not said:
            raise APIError(400, "input has no message, function_call or function_call_output", param="input")
        messages = [requests.Message.model_validate(message) for message in said]
        return requests.Conversation(messages=messages, reasoning=self.reasoning)


def _chat_tool(tool: ResponseTool) -> requests.Tool:
    return requests.Tool(type="function", function=requests.Function(**tool.model_dump(exclude={"type"})))


# -- the answer

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[bodies.TokenLogprob] | None = None


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class OutputDetails(BaseModel):
    reasoning_tokens: Literal[0] = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: bodies.PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """The response object: the request's parameters and the answer so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


# The fields of the request that the response object repeats as they are.
_REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs")


class Items:
    """The output items of one answer, in order. The last item is open while it may still grow; all others are closed.
    Methods that change an item return the stream events that report the change."""

    def __init__(self, *, scored: bool) -> None:
        """Create an empty list of items. `scored` says whether text comes with log-probabilities."""
        self.all: list[OutputMessage | OutputCall] = []
        self._scored = scored
        self._open = False
        self._next = 0  # number of the next event

    def event(self, kind: str, **content: Any) -> bytes:
        """Return an event of the stream, with the next number."""
        name = f"response.{kind}"
        data = encode_json({"type": name, "sequence_number": self._next, **content})
        self._next += 1
        return event(data, name)

    def add(self, piece: Piece) -> bytes:
        """Append a piece of an answer. The item to which it belongs is opened if it is not open."""
        if piece.kind == "content":
            return self.add_text(piece.text)
        if piece.kind == "call":
            return self.close() + self._add(OutputCall(id=f"fc_{new_id()}", call_id=call_id(), name=piece.text))
        if piece.kind == "reasoning":
            return b""
        item = self.all[-1]
        assert isinstance(item, OutputCall)
        item.arguments += piece.text
        return self._tell("function_call_arguments.delta", delta=piece.text)

    def add_text(self, text: str, logprobs: Sequence[bodies.TokenLogprob] = ()) -> bytes:
        """Append text, for which a message is opened if none is open."""
        if not text and not logprobs:
            return b""
        events = b""
        if not self._open or not isinstance(self.all[-1], OutputMessage):
            events = self.close() + self.open_message()
        message = self.all[-1]
        assert isinstance(message, OutputMessage)
        [part] = message.content
        part.text += text
        if part.logprobs is not None:
            part.logprobs += logprobs
        shown = [one.model_dump() for one in logprobs]
        return events + self._tell("output_text.delta", content_index=0, delta=text, logprobs=shown)

    def open_message(self) -> bytes:
        """Open a message without text."""
        message = OutputMessage(id=f"msg_{new_id()}", content=[])
        events = self._add(message)
        message.content = [OutputText(logprobs=[] if self._scored else None)]
        return events + self._tell("content_part.added", content_index=0, part=OutputText().model_dump())

    def close(self, status: Status = "completed") -> bytes:
        """Close the open output item, if there is one, and return the stream events that report it."""
        if not self._open:
            return b""
        item, self._open = self.all[-1], False
        item.status = status
        if isinstance(item, OutputCall):
            told = self._tell("function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            [part] = item.content
            shown = part.model_dump()
            told = self._tell("output_text.done", content_index=0, text=part.text, logprobs=shown["logprobs"] or [])
            told += self._tell("content_part.done", content_index=0, part=shown)
        return told + self.event("output_item.done", output_index=len(self.all) - 1, item=item.model_dump())

    def _add(self, item: OutputMessage | OutputCall) -> bytes:
        self.all.append(item)
        self._open = True
        return self.event("output_item.added", output_index=len(self.all) - 1, item=item.model_dump())

    def _tell(self, kind: str, **content: Any) -> bytes:
        """Return a stream event about the last output item."""
        return self.event(kind, item_id=self.all[-1].id, output_index=len(self.all) - 1, **content)


async def respond(service: Service, body: ResponsesRequest) -> Response:
    """Answer a request with the whole response, or with a stream that begins when the first token exists."""
    model = service.model(body.model)
    tools = body.chat_tools()
    structured = tools.structured(body.structured(), service.codec)
    read = tools.reader(service.codec) is not None
    if read and body.wants_logprobs:
        cause = "tools" if tools.used else "a model that writes its reasoning in channels"
        raise APIError(400, f"log-probabilities cannot be combined with {cause}: leave one of them out")
    prompt = await service.encode_chat(body.conversation(), tools.told)
    prompt = service.truncated(prompt, body, body.max_output_tokens)
    service.room([prompt], body.max_output_tokens)
    params = body.sampling(
        service.description.sampling,
        body.max_output_tokens or service.max_context - len(prompt),
        structured,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    answers = service.answers([prompt], params, special=read)
    return await service.respond(answers, _Turn(service, body, model, prompt, answers, tools), bool(body.stream))


class _Turn(AnswerFormat):
    last = b""  # empty, because the last event of an answer is response.completed or response.incomplete

    def __init__(
        self, service: Service, body: ResponsesRequest, model: str, prompt: TokenIds, answers: Answers, tools: Tools
    ) -> None:
        super().__init__(service, "resp", body, model, [prompt], answers)
        self._body = body
        self._items = Items(scored=body.wants_logprobs)
        self._reader = tools.reader(service.codec)
        self._begun = False

    async def whole(self) -> bytes:
        [choice] = await self._answers.collect()
        self._add(choice)
        self._close(choice.finish_reason)
        return self._response(choice.finish_reason).model_dump_json(by_alias=True).encode()

    def _event(self, delta: Delta) -> bytes:
        events = b""
        if not self._begun:
            self._begun = True
            response = self._response(None).model_dump(by_alias=True)
            events += self._items.event("created", response=response)
            events += self._items.event("in_progress", response=response)
            if self._reader is None:
                events += self._items.open_message()
        events += self._add(delta)
        if delta.finish_reason is not None:
            events += self._close(delta.finish_reason)
            response = self._response(delta.finish_reason).model_dump(by_alias=True)
            events += self._items.event(response["status"], response=response)
        return events

    def _add(self, delta: Delta) -> bytes:
        if self._reader is None:
            return self._items.add_text(delta.text, self._logprobs(delta))
        return b"".join(map(self._items.add, self._reader.add(delta.text, delta.finish_reason)))

    def _close(self, reason: bodies.FinishReason | None) -> bytes:
        """Close the last output item. If the answer has no items, add an empty message first."""
        events = b"" if self._items.all else self._items.open_message()
        return events + self._items.close("completed" if reason == "stop" else "incomplete")

    def _response(self, reason: bodies.FinishReason | None) -> ResponseObject:
        """Return the response object so far. `reason` is None while the answer is generated."""
        body, usage = self._body, None
        if reason is not None:
            used = self._usage(self._answers.completion_tokens)
            usage = ResponseUsage(
                input_tokens=used.prompt_tokens,
                input_tokens_details=used.prompt_tokens_details,
                output_tokens=used.completion_tokens,
                total_tokens=used.total_tokens,
            )
        choice = body.tool_choice or "auto"
        form = body.text.format if body.text else None
        return ResponseObject(
            **{name: getattr(body, name) for name in _REPEATED},
            id=self._head["id"],
            created_at=self._head["created"],
            status="in_progress" if reason is None else "completed" if reason == "stop" else "incomplete",
            model=self._head["model"],
            output=self._items.all if reason else [],
            usage=usage,
            incomplete_details=Incomplete() if reason == "length" else None,
            metadata=body.metadata or {},
            text={"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            tools=[tool.model_dump() for tool in body.tools or ()],
            tool_choice=choice if isinstance(choice, str) else {"type": "function", "name": choice.name},
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    def _logprobs(self, delta: Delta) -> list[bodies.TokenLogprob]:
        if not self._body.wants_logprobs:
            return []
        return bodies.chat_logprobs(self._tokenizer, bodies.scores(delta.tokens), self._body.top_logprobs or 0).content
