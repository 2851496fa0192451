"""POST /v1/responses: one answer to a conversation, which is sent whole each time, because nothing is stored."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel

from .answers import Answers, Delta
from .http import event
from .logprobs import chat_logprobs, scores
from .requests import Conversation, Message, ResponsesRequest
from .responses import FinishReason, PromptDetails, TokenLogprob
from .service import Answer, Service, encode_json

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] | None = None


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


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
    """An answer, as it was asked for and as far as it is known."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] = {"format": {"type": "text"}}
    tools: list[Any] = []
    tool_choice: Literal["none"] = "none"
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: Literal[False] = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


async def respond(service: Service, body: ResponsesRequest) -> Response:
    """A whole answer, or its stream once the first token is there."""
    model = service.model(body.model)
    prompt = await service.encode_chat(_conversation(body))
    prompt = service.truncated(prompt, body, body.max_output_tokens)
    service.room([prompt], body.max_output_tokens)
    params = body.sampling(
        body.max_output_tokens or service.max_context - len(prompt),
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    answers = service.answers([prompt], params)
    return await service.respond(answers, _Turn(service, body, model, prompt, answers), bool(body.stream))


def _conversation(body: ResponsesRequest) -> Conversation:
    first = [Message(role="system", content=body.instructions)] if body.instructions else []
    said = [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return Conversation(messages=[*first, *(Message.model_validate(message.plain()) for message in said)])


class _Turn(Answer):
    last = b""  # the stream ends with response.completed

    def __init__(
        self, service: Service, body: ResponsesRequest, model: str, prompt: list[int], answers: Answers
    ) -> None:
        super().__init__(service, "resp", body, model, [prompt], answers)
        self._body = body
        self._item = f"msg-{secrets.token_hex(12)}"
        self._events = 0

    async def whole(self) -> bytes:
        [choice] = await self._answers.collect()
        return self._response(choice.text, self._logprobs(choice), choice.finish_reason).model_dump_json().encode()

    async def chunks(self) -> AsyncGenerator[bytes]:
        text, logprobs = "", list[TokenLogprob]()
        reason: FinishReason | None = None
        place: dict[str, Any] = {"item_id": self._item, "output_index": 0, "content_index": 0}
        try:
            begun = False
            while not self._answers.finished:
                [delta] = await self._answers.take()
                events = b"" if begun else self._beginning(place)
                begun = True
                text, reason = text + delta.text, delta.finish_reason
                new = self._logprobs(delta) or []
                logprobs += new
                if delta.text or new:
                    shown = [one.model_dump() for one in new]
                    events += self._event("output_text.delta", **place, delta=delta.text, logprobs=shown)
                yield events
            yield self._end(place, text, logprobs if self._body.wants_logprobs else None, reason)
        finally:
            self._answers.close()

    def _beginning(self, place: dict[str, Any]) -> bytes:
        response = self._response("", None, None).model_dump()
        message = OutputMessage(id=self._item, status="in_progress", content=[]).model_dump()
        return b"".join(
            (
                self._event("created", response=response),
                self._event("in_progress", response=response),
                self._event("output_item.added", output_index=0, item=message),
                self._event("content_part.added", **place, part=OutputText(text="").model_dump()),
            )
        )

    def _end(
        self, place: dict[str, Any], text: str, logprobs: list[TokenLogprob] | None, reason: FinishReason | None
    ) -> bytes:
        response = self._response(text, logprobs, reason).model_dump()
        [item] = response["output"]
        [part] = item["content"]
        return b"".join(
            (
                self._event("output_text.done", **place, text=text, logprobs=part["logprobs"] or []),
                self._event("content_part.done", **place, part=part),
                self._event("output_item.done", output_index=0, item=item),
                self._event(response["status"], response=response),
            )
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        name = f"response.{kind}"
        data = encode_json({"type": name, "sequence_number": self._events, **content})
        self._events += 1
        return b"event: " + name.encode() + b"\n" + event(data)

    def _text_chunk(self, index: int, text: str) -> bytes:
        raise AssertionError("every event has a number of its own")

    def _response(self, text: str, logprobs: list[TokenLogprob] | None, reason: FinishReason | None) -> ResponseObject:
        """The answer so far; `reason` is None while it goes on."""
        body, usage = self._body, None
        status: Status = "in_progress" if reason is None else "completed" if reason == "stop" else "incomplete"
        if reason is not None:
            used = self._usage(self._answers.completion_tokens)
            usage = ResponseUsage(
                input_tokens=used.prompt_tokens,
                input_tokens_details=used.prompt_tokens_details,
                output_tokens=used.completion_tokens,
                total_tokens=used.total_tokens,
            )
        content = [OutputText(text=text, logprobs=logprobs)]
        return ResponseObject(
            id=self._head["id"],
            created_at=self._head["created"],
            status=status,
            model=self._head["model"],
            output=[OutputMessage(id=self._item, status=status, content=content)] if reason else [],
            usage=usage,
            incomplete_details=Incomplete() if reason == "length" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=body.temperature,
            top_p=body.top_p,
            top_logprobs=body.top_logprobs,
        )

    def _logprobs(self, delta: Delta) -> list[TokenLogprob] | None:
        if not self._body.wants_logprobs:
            return None
        return chat_logprobs(self._tokenizer, scores(delta.tokens), self._body.top_logprobs or 0).content
