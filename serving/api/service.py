"""What the routes share: one model behind its names, and the way from a prompt to answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.responses import Response

from ...errors import MegakernelError
from ...machine import host
from ...model.tokenizer import Tokenizer
from ...roofline import Ceilings, machine_ceilings
from ..async_engine import AsyncEngine
from ..live import Live
from ..llm import LLM
from ..sampling import SamplingParams
from .answers import Answers
from .errors import APIError, shortened
from .http import EventStream
from .metrics import Metrics
from .requests import Message, Prompt, Sampled
from .responses import Usage

T = TypeVar("T")
_INLINE = 4096  # characters that are tokenised on the event loop; longer texts take a thread


@dataclass(frozen=True)
class Limits:
    """What a server takes on. `max_waiting` counts choices that wait for their first step."""

    max_waiting: int = 65536
    max_body: int = 16 << 20  # bytes
    request_timeout: float | None = None  # seconds until an answer must be complete
    stall_timeout: float = 120.0  # seconds with work and without a finished step, after which /health is 503


class Service:
    """A model, its engine's thread and the server's limits. The first of `names` is what answers carry."""

    def __init__(
        self,
        llm: LLM,
        names: list[str] | None = None,
        keys: list[str] | None = None,
        limits: Limits = Limits(),
        ceilings: Ceilings | None = None,
    ) -> None:
        """`ceilings` are those that steps are held against; without them the nominal ones of this machine."""
        self.llm, self.limits = llm, limits
        self.names = names or [llm.model]
        self.keys = keys or []
        self.started = int(time.time())
        self.engine = AsyncEngine(llm.engine, max_waiting=limits.max_waiting)
        self.live = Live(
            ceilings or machine_ceilings(host(llm.threads)),
            self.engine.stats,
            tied=llm.config.tied,
            max_seqs=llm.engine.dims.max_seqs,
            about=llm.about
            | {"model": self.names[0], "kv_cache": f"KV in {llm.kv_cache}", "threads": f"{llm.threads} threads"},
        )
        self.engine.on_step.append(lambda step, seconds: self.live.add(step, seconds, self.engine.stats))
        self.engine.wants_trace = lambda: self.live.tracing
        self.metrics = Metrics(self.engine, self.live, self.names[0])

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.tokenizer

    @property
    def max_context(self) -> int:
        """Tokens that a prompt and its continuation may reach."""
        return self.llm.engine.dims.max_context

    def model(self, name: str | None) -> str:
        """The name to answer with. Raises a 404 for one that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise APIError(
                404,
                f"the model {shortened(repr(name))} is not served here: known are {', '.join(self.names)}",
                param="model",
            )
        return name

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        tokenizer = self.tokenizer
        if add_special or tokenizer is None:
            return await _off_loop(len(text), lambda: self.llm.encode(text))
        return await _off_loop(len(text), lambda: tokenizer.encode(text, add_special=False))

    async def encode_prompts(self, prompt: Prompt) -> list[list[int]]:
        """Token ids of a completion's prompts."""
        if isinstance(prompt, str):
            return [await self.encode(prompt)]
        prompts: list[list[int]] = []
        ids: list[int] = []
        for part in prompt:
            if isinstance(part, int):
                ids.append(part)
            else:
                prompts.append(await self.encode(part) if isinstance(part, str) else part)
        return prompts or [ids]

    async def encode_chat(self, messages: list[Message]) -> list[int]:
        plain = [message.plain() for message in messages]
        return await _off_loop(sum(len(m["content"]) for m in plain), lambda: self.llm.chat_ids(plain))

    def decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            raise MegakernelError(f"{self.names[0]} has no tokenizer: token ids have no text")
        vocab = self.llm.config.vocab
        if (wrong := next((token for token in ids if token >= vocab), None)) is not None:
            raise APIError(400, f"token {wrong} is outside the vocabulary of {vocab}", param="tokens")
        return self.tokenizer.decode(ids, skip_special=False)

    def room(self, prompts: list[list[int]], wanted: int | None) -> None:
        """Raises a 400 where a prompt and the tokens `wanted` after it (at least one) exceed the context."""
        longest = max(map(len, prompts))
        if longest + (wanted or 1) > self.max_context:
            asked = f"asks for {wanted} more" if wanted else "must have at least one more"
            raise APIError(
                400,
                f"This model's maximum context length is {self.max_context} tokens; the prompt has {longest} and"
                f" {asked}: shorten the prompt or lower max_tokens",
            )

    def answers(self, prompts: list[list[int]], params: SamplingParams) -> Answers:
        """Start to generate. Raises MegakernelError where a prompt can never run, Overloaded and EngineDead."""
        for prompt in prompts:
            self.llm.check(prompt, params)
        return Answers(self.engine, self.metrics, prompts, params, lambda: self.llm.transcripts(params))

    async def respond(self, answers: Answers, answer: Answer, stream: bool) -> Response:
        """The whole answer, or its stream once the first event is there. Whatever fails, nothing goes on generating."""
        try:
            if not stream:
                return Response(await self._in_time(answer.whole()), media_type="application/json")
            chunks = answer.chunks()
            return EventStream(await self._in_time(anext(chunks)), chunks)
        except BaseException:
            answers.close()
            raise

    async def _in_time(self, work: Awaitable[T]) -> T:
        """The result of `work`, or a 503 after the server's time limit."""
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                return await work
        except TimeoutError:
            raise APIError(
                503,
                f"no complete answer within {self.limits.request_timeout:g} s: ask for less or try again later",
                headers={"Retry-After": "5"},
            ) from None


class Answer(ABC):
    """An endpoint's way to put answers into JSON. `_head` is what every body of it begins with."""

    def __init__(
        self, service: Service, kind: str, body: Sampled, model: str, prompts: list[list[int]], answers: Answers
    ) -> None:
        self._service, self._prompts, self._answers = service, prompts, answers
        self._head: dict[str, Any] = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time())}
        self._head["model"] = model
        self._shows_ids = bool(body.return_token_ids) or service.tokenizer is None

    @abstractmethod
    async def whole(self) -> bytes: ...

    @abstractmethod
    def chunks(self) -> AsyncGenerator[bytes]: ...

    def _usage(self, completion: int) -> Usage:
        prompt = sum(map(len, self._prompts))
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


async def _off_loop(size: int, work: Callable[[], list[int]]) -> list[int]:
    return work() if size <= _INLINE else await asyncio.to_thread(work)
