"""The two kinds of partner in `megakernel chat`: a model in this process, or an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import MegakernelError
from . import on_interrupt

if TYPE_CHECKING:
    from megakernel.serving import LLM, SamplingParams
    from megakernel.serving.server.client import Token

Messages = list[dict[str, str]]
T = TypeVar("T")


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Count(msgspec.Struct):
    count: int
    max_model_len: int


@dataclass
class PartialAnswer:
    """The part of an answer that has arrived so far. `tokens` is None while the number of its tokens is unknown."""

    tokens: int | None = None
    finish_reason: str | None = "stopped"
    text: str = ""
    _moments: list[float] = field(default_factory=lambda: [perf_counter()])  # when it began, and when each piece came

    def add(self, text: str) -> None:
        self.text += text
        self._moments.append(perf_counter())

    @property
    def ttft_s(self) -> float | None:
        return self._moments[1] - self._moments[0] if self.text else None

    @property
    def tpot_s(self) -> float | None:
        several = self.text and self.tokens and self.tokens > 1
        return (self._moments[-1] - self._moments[1]) / (self.tokens - 1) if several and self.tokens else None


class LocalModel:
    """A model whose engine runs in this process. `name` is shown before its answers."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.name, self._llm, self._params = llm.model, llm, params
        llm.get_tokenizer()  # raises an error if the model has no tokenizer

    def count(self, messages: Messages) -> tuple[int, int] | None:
        """Return the number of tokens of the conversation, and the context's maximum for the conversation and its
        answer together. The result is None if these numbers are unknown."""
        return len(self._llm.chat_ids(messages)), self._llm.engine.dims.bucket.max_context

    def reply(
        self, messages: Messages, answer: PartialAnswer, show: Callable[[str], None], max_tokens: int | None
    ) -> None:
        """Answer the last message. Each piece of text is added to `answer` and passed to `show` when it arrives. If
        Ctrl-C (KeyboardInterrupt) ends the answer, `answer` keeps the pieces so far."""
        reader = self._llm.codec.reader(None)

        def take(token: Token, text: str) -> None:
            answer.tokens = (answer.tokens or 0) + 1
            text = reader.content(text, token.finish_reason) if reader else text
            answer.add(text)
            show(text)

        ids, most = self._llm.chat_ids(messages), max_tokens or self._params.max_tokens
        params = replace(self._params, max_tokens=most, skip_special_tokens=reader is None)
        with _interrupted_between_steps() as check:
            [result] = self._llm.generate([ids], params, on_token=take, on_step=lambda _: check())
        answer.finish_reason = result.finish_reason


@contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C in the `with` block, so that no step of the engine is interrupted. The block calls the yielded
    function between two steps. If Ctrl-C was pressed, the function raises KeyboardInterrupt."""
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    with on_interrupt(note):
        yield check


class RemoteModel:
    """A server with the OpenAI API at `url`, with or without `/v1` at the end. `model` is one of the server's model
    names; None means its first model."""

    def __init__(self, url: str, model: str | None, key: str | None, temperature: float | None) -> None:
        from megakernel.serving.bench import ServerClient

        self._client = ServerClient(url, model=model, api_key=key)
        self._how = {} if temperature is None else {"temperature": temperature}
        self._context: int | None = None
        self._run(self._client.discover())
        self.name = str(self._client.model)

    def count(self, messages: Messages) -> tuple[int, int] | None:
        """Like `LocalModel.count`. The server counts at `/tokenize`, which only megakernel and vLLM have. If it
        refuses several messages and its maximum context is known, these messages count as too long."""
        try:
            answer = self._run(self._client.post("/tokenize", {"model": self.name, "messages": messages}))
            found = msgspec.json.decode(answer, type=_Count)
        except (MegakernelError, ValueError, RecursionError):
            return (self._context + 1, self._context) if self._context and len(messages) > 1 else None
        self._context = found.max_model_len
        return found.count, found.max_model_len

    def reply(
        self, messages: Messages, answer: PartialAnswer, show: Callable[[str], None], max_tokens: int | None
    ) -> None:
        from megakernel.serving.bench.client import said

        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= self._how | ({} if max_tokens is None else {"max_tokens": max_tokens})

        async def read() -> None:
            async for data in self._client.events("/v1/chat/completions", body):
                event = msgspec.json.decode(data, type=_Event)
                if event.error is not None:
                    raise MegakernelError(f"the server says: {said(event.error)}")
                for choice in event.choices or ():
                    if choice.delta and (text := choice.delta.content):
                        answer.add(text)
                        show(text)
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
                if event.usage:
                    answer.tokens = event.usage.completion_tokens

        self._run(read())
        if answer.finish_reason == "stopped":
            raise MegakernelError(f"{self._client.url} ended its answer before it was complete: send the message again")

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        """Run `request` and return its result. Ctrl-C cancels it. Raises MegakernelError if the request fails."""
        from megakernel.serving.bench.client import ERRORS, RefusedError

        async def run() -> T:
            try:
                return await request
            finally:
                await self._client.close()

        try:
            return asyncio.run(run())
        except RefusedError as e:
            raise MegakernelError(f"the server says: {e.said}") from None
        except ERRORS as e:
            raise MegakernelError(f"the request to {self._client.url} failed: {e or type(e).__name__}") from e


Partner = LocalModel | RemoteModel
