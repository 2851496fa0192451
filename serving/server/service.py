"""The code that all endpoints share: model names, tokenization, checks of prompts, and the start of generation."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi.responses import Response

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.tokens import TokenIds
from megakernel.serving.server.board import Board
from megakernel.serving.server.client import Answers, Delta, EngineClient
from megakernel.serving.server.errors import APIError, quoted
from megakernel.serving.server.http import EventStream, event
from megakernel.serving.server.limits import THREADS, AccessRules, Limits, max_values
from megakernel.serving.server.messages import Description
from megakernel.serving.server.metrics import Metrics
from megakernel.serving.server.replay import REPLAYED, created, new_id
from megakernel.serving.server.routes.bodies import PromptDetails, PromptLogprobs, Usage, prompt_logprobs
from megakernel.serving.server.routes.requests import Choices, Conversation, Sampled, Truncated
from megakernel.serving.server.turns import CLIENT, ThreadTurns
from megakernel.serving.text.codec import Codec

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a placeholder for the text of a chunk, see `_text_event`


def encode_json(value: object) -> bytes:
    """Return a value as JSON. The fast encoder cannot write integers beyond 64 bits, so another one writes these."""
    try:
        return _encode(value)
    except OverflowError:
        return json.dumps(value).encode()


class Service:
    """What the endpoints of an HTTP server process share: the engine, the tokenizer, access control and limits.
    Requests may use any of `names` for the model. A request that names no model is answered with the first one."""

    def __init__(
        self,
        description: Description,
        codec: Codec,
        number: int,
        identity: str,
        names: list[str] | None = None,
        access: AccessRules | None = None,
        limits: Limits | None = None,
        seed: int | None = None,
    ) -> None:
        """`number` is the index of this process's row on the board (the counters in shared memory). `identity` is its
        name in messages to the engine; no later process gets the same name. With `seed`, requests without a seed get
        one that depends on `seed` and on the order of the requests."""
        self.description = description
        self.codec = codec
        self.access, self.limits = access or AccessRules(), limits or Limits()
        self.names = names or [description.name]
        self._turns = ThreadTurns(THREADS)
        self._seeds = None if seed is None else Random(f"{seed} {number}")
        self._longest = codec.tokenizer.longest_token() if codec.tokenizer else 0
        self.started = int(time.time())
        self.engine = EngineClient(description, identity)
        board = Board(description.board, description.rows)
        self.metrics = Metrics(board, number, kv_page=description.kv_page, model=self.names[0])

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.codec.tokenizer

    @property
    def max_context(self) -> int:
        """Return the maximum number of tokens of a prompt and its continuation together."""
        return self.description.max_context

    def model(self, name: str | None) -> str:
        """Return the model name that the answer contains. Raises a 404 for a name that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise APIError(
                404,
                f"the model {quoted(name)} is not served here: the models are {', '.join(self.names)}",
                param="model",
            )
        return name

    def _encode(self, text: str, add_special: bool) -> TokenIds:
        tokenizer = self.codec.need("give token ids instead of text")
        return np.array(tokenizer.encode(text, add_special=add_special), np.int32)

    async def encode_prompts(self, prompts: Sequence[str] | Sequence[list[int]], add_special: bool) -> list[TokenIds]:
        """Return the token ids of each prompt of a completion request."""
        self._check_text(*(prompt for prompt in prompts if isinstance(prompt, str)))
        return [
            await self._turns.run(partial(self._encode, prompt, add_special))
            if isinstance(prompt, str)
            else np.array(prompt, np.int32)
            for prompt in prompts
        ]

    async def encode_chat(self, asked: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> TokenIds:
        """Return the token ids of a conversation, up to where the answer begins. The model may call `tools`."""
        plain = [message.plain() for message in asked.messages]
        told = [encode_json(tools).decode()] if tools else []
        told += [encode_json(calls).decode() for message in plain if (calls := message.get("tool_calls"))]
        self._check_text("".join([*(m["content"] + m.get("reasoning_content", "") for m in plain), *told]))
        values = {**asked.template_values, "now": created()}
        conversation = partial(
            self.codec.chat_ids,
            plain,
            values,
            tools=tools,
            continue_final=bool(asked.continue_final_message),
            add_special=bool(asked.add_special_tokens),
        )
        return np.array(await self._turns.run(conversation), np.int32)

    async def decode(self, ids: Sequence[int] | TokenIds) -> str:
        tokenizer = self.codec.need("token ids cannot be converted to text")
        self.check_count(ids)
        vocab = self.description.vocab
        if (wrong := next((token for token in ids if token >= vocab), None)) is not None:
            raise APIError(400, f"token {wrong} is outside the vocabulary of {vocab} tokens", param="tokens")
        return await self._turns.run(partial(tokenizer.decode, ids, skip_special=False))

    def check_count(self, ids: Sequence[int] | TokenIds) -> None:
        """Raise a 400 if there are more tokens than the context has room for."""
        if len(ids) > self.max_context:
            raise APIError(
                400, f"This model's maximum context length is {self.max_context} tokens, but the request has {len(ids)}"
            )

    def _check_text(self, *texts: str) -> None:
        """Raise a 400, without tokenizing, for a text that certainly does not fit the context. Such a text has more
        bytes than `max_context` copies of the vocabulary's longest token."""
        most = self.max_context * self._longest
        size = max((len(text.encode("utf-8", "surrogatepass")) for text in texts), default=0)
        if self._longest and size > most:
            raise APIError(
                400,
                f"This model's maximum context length is {self.max_context} tokens, and its longest token has"
                f" {self._longest} bytes, so a text may have at most {most} bytes, not {size}: shorten the prompt",
            )

    def room(self, prompts: list[TokenIds], wanted: int | None) -> None:
        """Raise a 400 if a prompt and the `wanted` tokens after it (at least one token) exceed the context. The error
        is also raised if all prompts of the request together have too many tokens."""
        most, total = max_values(self.max_context), sum(map(len, prompts))
        if total > most:
            raise APIError(
                400, f"a request's prompts may have {most} tokens together, not {total}: send several requests"
            )
        longest = max(map(len, prompts))
        if longest + (wanted or 1) > self.max_context:
            asked = f"the request asks for {wanted} more" if wanted else "the answer needs at least one more"
            raise APIError(
                400,
                f"This model's maximum context length is {self.max_context} tokens; the prompt has {longest} tokens,"
                f" and {asked}: shorten the prompt or lower max_tokens",
            )

    def truncated(self, prompt: TokenIds, body: Truncated, wanted: int | None) -> TokenIds:
        """Return the last `truncate_prompt_tokens` tokens of the prompt, or the whole prompt if that field is absent.
        If the field is -1, keep as many tokens as leave room in the context for `wanted` new tokens (at least one)."""
        most = body.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == -1:
            most = max(1, self.max_context - (wanted or 1))
        if most == 0:
            told = "truncate_prompt_tokens must be -1 or at least 1, not 0"
            raise APIError(400, told, param="truncate_prompt_tokens")
        return prompt[-most:]

    def answers(self, prompts: list[TokenIds], params: SamplingParams, *, special: bool = False) -> Answers:
        """Submit prompts to the engine, and return their choices (completions). `special` keeps special tokens in the
        text. Raises EngineDead if the engine has stopped, and MegakernelError for stop strings without a tokenizer."""
        replay = REPLAYED.get()
        if self._seeds and params.seed is None and replay is None:
            params = replace(params, seed=self._seeds.getrandbits(64))
        self.codec.check(params)
        transcripts = [one for prompt in prompts for one in self.codec.transcripts(prompt, params, special=special)]
        seed = replay.seed if replay else None
        return self.engine.submit(prompts, params, CLIENT.get(), transcripts, self.metrics, seed)

    async def respond(self, answers: Answers, answer: AnswerFormat, stream: bool) -> Response:
        """Return the whole answer, or a stream that begins when its first event exists. On any failure, generation is
        aborted."""
        if stream:
            chunks = answer.chunks()
            response: Response = EventStream(await self.finished(answers, anext(chunks)), chunks, answer.last)
        else:
            response = Response(await self.finished(answers, answer.whole()), media_type="application/json")
        if answers.unenforced:
            response.headers["X-Unenforced"] = ", ".join(answers.unenforced)
        return response

    async def finished(self, answers: Answers, work: Awaitable[T]) -> T:
        """Return the result of `work`, which reads `answers`. On any failure, generation is aborted. Raises a 503 if
        `work` takes longer than the server's time limit."""
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                return await work
        except BaseException as e:
            answers.close()
            if not isinstance(e, TimeoutError):
                raise
            raise APIError(
                503,
                f"no complete answer, or no first token of a stream, within {self.limits.request_timeout:g} s:"
                " ask for fewer tokens or try again later",
                headers={"Retry-After": "5"},
            ) from None


class AnswerFormat(ABC):
    """Formats the answer to one request as JSON. Each generating endpoint has its own subclass. `_head` holds the id,
    creation time and model name for every response body. `last` is the final event of a stream."""

    last = event(b"[DONE]")

    def __init__(
        self, service: Service, kind: str, body: Sampled, model: str, prompts: list[TokenIds], answers: Answers
    ) -> None:
        self._service, self._prompts, self._answers = service, prompts, answers
        # Log-probabilities show tokens as text, or as `token_id:N` if the request asks for that or there is no
        # tokenizer.
        choices = body if isinstance(body, Choices) else None
        self._tokenizer = None if choices and choices.return_tokens_as_token_ids else service.tokenizer
        self._head: dict[str, Any] = {"id": f"{kind}-{new_id()}", "created": created()}
        self._head["model"] = model
        self._shows_ids = bool(choices and choices.return_token_ids) or service.tokenizer is None
        self._around: dict[int, list[bytes]] = {}  # choice -> the JSON of a chunk before and after its text

    @abstractmethod
    async def whole(self) -> bytes: ...

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream, without the last one. If another server could continue the answer, yield one
        item per token, even if the token has no new event."""
        replay = REPLAYED.get()
        make = partial(replay.events, self._event) if replay else self._event
        try:
            while not self._answers.finished:
                if (events := b"".join(map(make, await self._answers.take(singly=bool(replay))))) or replay:
                    yield events
            if (usage := self._usage_chunk()) is not None:
                yield event(usage)
        finally:
            self._answers.close()

    @abstractmethod
    def _event(self, delta: Delta) -> bytes:
        """Return the events for the new tokens of a choice."""

    def _usage_chunk(self) -> bytes | None:
        """Return the chunk with the usage at the end of a stream, or None if the client has not asked for it."""
        return None

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Return a chunk of a choice that contains only new text."""
        raise NotImplementedError

    def _text_event(self, index: int, text: str) -> bytes:
        """Return `_text_chunk` as an event. To save time, the JSON around the text is made only once per choice."""
        if (around := self._around.get(index)) is None:
            around = self._around[index] = event(self._text_chunk(index, _MARK)).split(f'"{_MARK}"'.encode())
        before, after = around
        return before + encode_json(text) + after

    def _prompt_logprobs(self, index: int, count: int | None) -> PromptLogprobs | None:
        """Return the log-probabilities of prompt number `index`, with `count` top tokens at each position. Returns None
        if `count` is None. The engine must have sent the prompt's log-probabilities already."""
        if count is None:
            return None
        return prompt_logprobs(self._tokenizer, self._prompts[index].tolist(), self._answers.scores[index][1], count)

    def _usage(self, completion: int) -> Usage:
        prompt = sum(map(len, self._prompts))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=self._answers.cached),
        )
