"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi.responses import Response

from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.http import event
from megakernel.serving.server.routes.logprobs import chat_logprobs, scores
from megakernel.serving.server.routes.requests import ChatRequest
from megakernel.serving.server.routes.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from megakernel.serving.server.routes.tools import Tools, call_id
from megakernel.serving.server.service import Answer, Service
from megakernel.serving.text.tool_calls import CallDelta, ToolReader


async def chat(service: Service, body: ChatRequest) -> Response:
    """Answer a conversation with the whole answer, or with a stream that begins when the first token exists."""
    model = service.model(body.model)
    tools = Tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    structured = tools.structured(body.structured(), service.codec)
    prompt = await service.encode_chat(body, tools.told)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = service.truncated(prompt, body, wanted)
    service.room([prompt], wanted)
    params = body.sampling(
        service.max_context - len(prompt) if wanted is None else wanted,
        structured,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    answers = service.answers([prompt], params, special=tools.used)
    return await service.respond(answers, _Chat(service, body, model, prompt, answers, tools), bool(body.stream))


class _Chat(Answer):
    def __init__(
        self, service: Service, body: ChatRequest, model: str, prompt: list[int], answers: Answers, tools: Tools
    ) -> None:
        super().__init__(service, "chatcmpl", body, model, [prompt], answers)
        self._body, self._tools = body, tools
        last = body.messages[-1]
        self._before = last.plain()["content"] if body.echo and last.role == "assistant" else ""
        self._readers: dict[int, ToolReader] = {}

    async def whole(self) -> bytes:
        choices = await self._answers.collect()
        response = ChatResponse(
            **self._head,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=message,
                    logprobs=self._logprobs(choice),
                    finish_reason="tool_calls" if message.tool_calls else choice.finish_reason or "length",
                    token_ids=choice.token_ids if self._shows_ids else None,
                )
                for choice in choices
                for message in [self._message(choice)]
            ],
            usage=self._usage(self._answers.completion_tokens),
            prompt_token_ids=self._prompts[0] if self._shows_ids else None,
            prompt_logprobs=self._prompt_logprobs(0, self._body.prompt_logprobs),
        )
        return response.model_dump_json().encode()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream.

        The first chunk of each choice contains the role and, with `echo`, the text of the last assistant message.
        """
        begun: set[int] = set()
        try:
            while not self._answers.finished:
                events = []
                for delta in await self._answers.take():
                    if delta.index not in begun:
                        begun.add(delta.index)
                        role = ChatDelta(role="assistant", content=self._before)
                        events.append(event(self._chunk([ChatChunkChoice(index=delta.index, delta=role)])))
                    events.append(self._event(delta))
                if joined := b"".join(events):
                    yield joined
            if self._body.wants_usage_chunk:
                yield event(self._chunk([], self._usage(self._answers.completion_tokens)))
        finally:
            self._answers.close()

    def _message(self, choice: Delta) -> ChatMessage:
        """Return a choice as a message. Tool calls are extracted from the text of the choice."""
        if (reader := self._tools.reader(self._service.codec)) is None:
            return ChatMessage(content=self._before + choice.text)
        text, deltas = reader.add(choice.text, True)
        calls: list[ToolCall] = []
        for delta in deltas:
            if delta.name is not None:
                calls.append(ToolCall(id=call_id(), function=FunctionCall(name=delta.name, arguments="")))
            calls[delta.index].function.arguments += delta.arguments
        text = self._before + text
        return ChatMessage(content=text or None if calls else text, tool_calls=calls or None)

    def _tool_event(self, delta: Delta) -> bytes:
        """Return the events for the new tokens of a choice that may call tools.

        There is no event for new text that may still turn out to be part of a tool call.
        """
        reader = self._readers.get(delta.index)
        if reader is None and (reader := self._tools.reader(self._service.codec)) is not None:
            self._readers[delta.index] = reader
        assert reader is not None
        text, found = reader.add(delta.text, delta.finish_reason is not None)
        # Many clients read only one call per event, so each piece of a call gets an event of its own.
        pieces = [ChatDelta(content=text)] if text else []
        pieces += [ChatDelta(tool_calls=[_call_delta(call)]) for call in found]
        new = self._choice(delta)
        new.delta = pieces.pop() if pieces else ChatDelta()
        if delta.finish_reason is not None and reader.calls:
            new.finish_reason = "tool_calls"
        events = [event(self._chunk([ChatChunkChoice(index=delta.index, delta=piece)])) for piece in pieces]
        if new.delta.content or new.delta.tool_calls or new.finish_reason or new.logprobs or new.token_ids:
            events.append(event(self._chunk([new])))
        return b"".join(events)

    def _event(self, delta: Delta) -> bytes:
        if self._tools.used:
            return self._tool_event(delta)
        if delta.finish_reason is None and not self._body.logprobs and not self._shows_ids:
            return self._text_event(delta.index, delta.text)
        return event(self._chunk([self._choice(delta)]))

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        return ChatChunk(**self._head, choices=choices, usage=usage).model_dump_json().encode()

    def _choice(self, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            token_ids=delta.token_ids if self._shows_ids else None,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._tokenizer, scores(delta.tokens), self._body.top_logprobs or 0)


def _call_delta(call: CallDelta) -> ToolCallDelta:
    function = FunctionDelta(name=call.name, arguments=call.arguments)
    if call.name is None:
        return ToolCallDelta(index=call.index, function=function)
    return ToolCallDelta(index=call.index, id=call_id(), type="function", function=function)
