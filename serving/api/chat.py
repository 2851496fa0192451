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
    prompt = await service.encode_chat(body)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = service.truncated(prompt, body, wanted)
    service.room([prompt], wanted)
    params = body.sampling(
        service.max_context - len(prompt) if wanted is None else wanted,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    answers = service.answers([prompt], params)
    return await service.respond(answers, _Chat(service, body, model, prompt, answers), bool(body.stream))


class _Chat(Answer):
    def __init__(self, service: Service, body: ChatRequest, model: str, prompt: list[int], answers: Answers) -> None:
        super().__init__(service, "chatcmpl", body, model, [prompt], answers)
        self._body = body
        last = body.messages[-1]
        self._before = last.plain()["content"] if body.echo and last.role == "assistant" else ""

    async def whole(self) -> bytes:
        choices = await self._answers.collect()
        response = ChatResponse(
            **self._head,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content=self._before + choice.text),
                    logprobs=self._logprobs(choice),
                    finish_reason=choice.finish_reason or "length",
                    token_ids=choice.token_ids if self._shows_ids else None,
                )
                for choice in choices
            ],
            usage=self._usage(self._answers.completion_tokens),
            prompt_token_ids=self._prompts[0] if self._shows_ids else None,
            prompt_logprobs=self._prompt_logprobs(0, self._body.prompt_logprobs),
        )
        return response.model_dump_json().encode()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Each choice begins with its role, and with the last message where that is to be repeated."""
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
        return chat_logprobs(self._tokenizer, scores(delta.tokens), self._body.top_logprobs or 0)
