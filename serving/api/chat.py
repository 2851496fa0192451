"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi.responses import Response

from .answers import Answers, Delta
from .http import event
from .logprobs import chat_logprobs, scores
from .requests import ChatRequest
from .responses import ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, ChatResponse, Usage
from .service import Answer, Service


async def chat(service: Service, body: ChatRequest) -> Response:
    """A whole answer, or its stream once the first token is there."""
    model = service.model(body.model)
    prompt = await service.encode_chat(body.messages)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    service.room([prompt], wanted)
    params = body.sampling(
        service.max_context - len(prompt) if wanted is None else wanted,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    answers = service.answers([prompt], params)
    return await service.respond(answers, _Chat(service, body, model, prompt, answers), bool(body.stream))


class _Chat(Answer):
    def __init__(self, service: Service, body: ChatRequest, model: str, prompt: list[int], answers: Answers) -> None:
        super().__init__(service, "chatcmpl", body, model, [prompt], answers)
        self._body = body

    async def whole(self) -> bytes:
        response = ChatResponse(
            **self._head,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content=choice.text),
                    logprobs=self._logprobs(choice),
                    finish_reason=choice.finish_reason or "length",
                    token_ids=choice.token_ids if self._shows_ids else None,
                )
                for choice in await self._answers.collect()
            ],
            usage=self._usage(self._answers.completion_tokens),
            prompt_token_ids=self._prompts[0] if self._shows_ids else None,
        )
        return response.model_dump_json().encode()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Each choice begins with its role and no text."""
        begun: set[int] = set()
        try:
            while not self._answers.finished:
                events = []
                for delta in await self._answers.take():
                    if delta.index not in begun:
                        begun.add(delta.index)
                        role = ChatDelta(role="assistant", content="")
                        events.append(event(self._chunk([ChatChunkChoice(index=delta.index, delta=role)])))
                    events.append(self._event(delta))
                yield b"".join(events)
            if self._body.wants_usage_chunk:
                yield event(self._chunk([], self._usage(self._answers.completion_tokens)))
        finally:
            self._answers.close()

    def _event(self, delta: Delta) -> bytes:
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
        return chat_logprobs(self._service.tokenizer, scores(delta.tokens), self._body.top_logprobs or 0)
