"""POST /v1/responses: answers a conversation. Nothing is stored, so each request contains the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel

from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.routes.items import Events, Items, OutputCall, OutputMessage, Status
from megakernel.serving.server.routes.logprobs import chat_logprobs, scores
from megakernel.serving.server.routes.responses import FinishReason, PromptDetails, TokenLogprob
from megakernel.serving.server.routes.responses_body import ResponsesRequest
from megakernel.serving.server.routes.tools import Tools
from megakernel.serving.server.service import Answer, Service


class OutputDetails(BaseModel):
    reasoning_tokens: Literal[0] = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptDetails
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


async def respond(service: Service, body: ResponsesRequest) -> Response:
    """Answer a request with the whole response, or with a stream that begins when the first token exists."""
    model = service.model(body.model)
    tools = Tools(*body.chat_tools(), body.parallel_tool_calls)
    structured = tools.structured(body.structured(), service.codec)
    if tools.used and body.wants_logprobs:
        raise APIError(400, "log-probabilities cannot be combined with tools: leave one of them out")
    prompt = await service.encode_chat(body.conversation(), tools.told)
    prompt = service.truncated(prompt, body, body.max_output_tokens)
    service.room([prompt], body.max_output_tokens)
    params = body.sampling(
        body.max_output_tokens or service.max_context - len(prompt),
        structured,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    answers = service.answers([prompt], params, special=tools.used)
    return await service.respond(answers, _Turn(service, body, model, prompt, answers, tools), bool(body.stream))


class _Turn(Answer):
    last = b""  # empty, because `chunks` already ends with response.completed or response.incomplete

    def __init__(
        self, service: Service, body: ResponsesRequest, model: str, prompt: list[int], answers: Answers, tools: Tools
    ) -> None:
        super().__init__(service, "resp", body, model, [prompt], answers)
        self._body = body
        self._events = Events()
        self._items = Items(self._events, scored=body.wants_logprobs)
        self._reader = tools.reader(service.codec)

    async def whole(self) -> bytes:
        [choice] = await self._answers.collect()
        self._add(choice)
        self._close(choice.finish_reason)
        return self._response(choice.finish_reason).model_dump_json(by_alias=True).encode()

    async def chunks(self) -> AsyncGenerator[bytes]:
        reason: FinishReason | None = None
        try:
            [delta] = await self._answers.take()
            response = self._response(None).model_dump(by_alias=True)
            events = self._events.make("created", response=response)
            events += self._events.make("in_progress", response=response)
            if self._reader is None:
                events += self._items.open_message()
            yield events + self._add(delta)
            while not self._answers.finished:
                [delta] = await self._answers.take()
                if new := self._add(delta):
                    yield new
            reason = delta.finish_reason
            events = self._close(reason)
            response = self._response(reason).model_dump(by_alias=True)
            yield events + self._events.make(response["status"], response=response)
        finally:
            self._answers.close()

    def _add(self, delta: Delta) -> bytes:
        if self._reader is None:
            return self._items.add(delta.text, logprobs=self._logprobs(delta))
        return self._items.add(*self._reader.add(delta.text, delta.finish_reason is not None))

    def _close(self, reason: FinishReason | None) -> bytes:
        """Close the last output item. If the answer has no items, add an empty message first."""
        events = b"" if self._items.all else self._items.open_message()
        return events + self._items.close("completed" if reason == "stop" else "incomplete")

    def _text_chunk(self, index: int, text: str) -> bytes:
        raise AssertionError("events of /v1/responses are numbered, so no cached chunk can be used")

    def _response(self, reason: FinishReason | None) -> ResponseObject:
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
            id=self._head["id"],
            created_at=self._head["created"],
            status="in_progress" if reason is None else "completed" if reason == "stop" else "incomplete",
            model=self._head["model"],
            output=self._items.all if reason else [],
            usage=usage,
            incomplete_details=Incomplete() if reason == "length" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=body.temperature,
            top_p=body.top_p,
            top_logprobs=body.top_logprobs,
            text={"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            tools=[tool.model_dump() for tool in body.tools or ()],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    def _logprobs(self, delta: Delta) -> list[TokenLogprob]:
        if not self._body.wants_logprobs:
            return []
        return chat_logprobs(self._tokenizer, scores(delta.tokens), self._body.top_logprobs or 0).content
