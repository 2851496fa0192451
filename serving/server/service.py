"""How a frontend answers a request. It converts a conversation or prompt to token ids, submits the ids to the engine,
and returns the generated tokens as an answer. All endpoints share this code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from random import Random
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from fastapi import Depends, Request
from fastapi.responses import Response

from megakernel.model.chat_template import TooLong
from megakernel.model.tokenizer import Limit
from megakernel.serving.engine.sampling import SamplingParams, TokenIds
from megakernel.serving.server.board import Board
from megakernel.serving.server.client import Answers, EngineClient
from megakernel.serving.server.errors import APIError, quoted
from megakernel.serving.server.limits import MAX_LOGPROBS, MAX_WATCHED, THREADS, AccessRules, Limits, max_values
from megakernel.serving.server.messages import Description
from megakernel.serving.server.metrics import Metrics
from megakernel.serving.server.requests import Choices, Sampled, Truncated
from megakernel.serving.server.writer import REPLAYED, EventStream, WholeAnswer, Writer, created
from megakernel.serving.text.codec import Codec, Conversation

T = TypeVar("T")
CLIENT: ContextVar[str] = ContextVar("client", default="")  # the client address of the current request
ANSWERS: ContextVar[list[Answers]] = ContextVar("answers")  # gets the answers to the current request, for the log


class Start(msgspec.Struct, frozen=True):
    """The configuration that a frontend (HTTP server process) gets from its parent."""

    description: Description
    number: int = 0  # index of this process's row on the board, the counters in shared memory
    identity: str = ""  # name of this process in its messages to the engine; no later process gets the same name
    names: list[str] | None = None  # names of the model in requests; None: only its own
    access: AccessRules = AccessRules()
    limits: Limits = Limits()
    drain_seconds: float = 10.0
    log_level: int = logging.WARNING
    log_requests: bool = True  # whether the log has a line for each request, if its level is at most INFO
    listener: int = -1  # file descriptor of the listening socket that all frontends share
    parent: int = -1  # file descriptor of a socket whose other end closes when the parent ends
    tool_parser: str | None = None  # name of the model's tool call format; None: the chat template decides
    chat_template: str | None = None  # Jinja source that replaces the model's chat template
    # With `seed`, requests without a seed get one that depends on `seed` and on the order of the requests.
    seed: int | None = None
    root_path: str = ""  # path under which a reverse proxy serves this server
    tls: tuple[str, str] | None = None  # paths of the PEM files with the private key and the certificate


class ThreadTurns:
    """Runs work in `threads` threads. One client's work occupies at most all threads but one. So a thread is left for
    other clients, however much work one client has sent."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "turns")
        self._most = max(1, threads - 1)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by client

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for the client's turn, run `work` in a thread, and return its result. If the caller is cancelled, the
        work still counts until it ends."""
        turn = self._turns.setdefault(CLIENT.get(), asyncio.Semaphore(self._most))
        await turn.acquire()
        done = asyncio.get_running_loop().run_in_executor(self._pool, work)
        done.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(done)


class Tools:
    """The functions that the model may call, in the OpenAI API's form, and which of them the answer may or must call.
    `choice` is "none", "auto", "required" or an object, whose method `chosen` returns a word and the names of the
    allowed functions (None: all). The word is one of the three above, or "named": the one allowed function must be
    called. If `parallel` is false, one call is the maximum. Raises an HTTP error 400 if arguments are inconsistent."""

    def __init__(self, given: list[dict[str, Any]], choice: Any = None, parallel: bool | None = None) -> None:
        mode, only = (choice, None) if isinstance(choice, str | None) else choice.chosen()
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in given}
        if len(functions) < len(given):
            raise APIError(400, "tools: two functions have the same name: rename one", param="tools")
        if not given and (mode == "required" or only):
            raise APIError(400, "tool_choice needs tools, but the request has none", param="tool_choice")
        if only is not None and (other := [name for name in only if name not in functions]):
            raise APIError(400, f"tool_choice names {other[0]!r:.80}, which is none of the tools", param="tool_choice")
        self.told = given
        self.required = mode in ("required", "named")
        self.several = mode != "named" and parallel is not False
        used = given and mode != "none"  # if not, `functions` is None
        self.functions = {name: functions[name] for name in functions if only is None or name in only} if used else None


class Service:
    """What the endpoints of an HTTP server process share: the engine, the tokenizer, access control and limits.
    Requests may use any of `names` for the model. A request that names no model is answered with the first one."""

    def __init__(self, start: Start, codec: Codec) -> None:
        self.description = description = start.description
        self.max_context = description.max_context  # maximum tokens of a prompt and its continuation together
        self.codec, self.tokenizer, self.access, self.limits = codec, codec.tokenizer, start.access, start.limits
        self.names = start.names or [description.name]
        self._turns = ThreadTurns(THREADS)
        self._seeds = None if start.seed is None else Random(f"{start.seed} {start.number}")
        self._most = max_values(description.max_context)  # tokens of all prompts of a request together
        self.started = int(time.time())
        board = Board(description.board, description.rows)
        self.metrics = Metrics(board, start.number, kv_page=description.kv_page, model=self.names[0])
        self.engine = EngineClient(description, start.identity, self.metrics)

    def model(self, name: str | None) -> str:
        """Return the model name that the answer contains. Raises a 404 for a name that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            told = f"the model {quoted(name)} is not served here: the models are {', '.join(self.names)}"
            raise APIError(404, told, param="model")
        return name

    async def encode_prompts(
        self, prompts: Sequence[str] | Sequence[list[int]], add_special: bool, limit: Limit | None = None
    ) -> list[TokenIds]:
        """Return the token ids of each prompt of a completion request. With `limit`, only the last ids are kept."""
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                encode = self.codec.need("give token ids instead of text").encode
                work = partial(encode, prompt, add_special=add_special, limit=limit or Limit(self.max_context))
                found.append(await self._ids(work, limit))
            else:
                found.append(_cut(prompt, limit))
        return found

    async def _ids(self, work: Callable[[], list[int]], limit: Limit | None) -> TokenIds:
        try:
            return _cut(await self._turns.run(work), limit)
        except TooLong as e:
            raise self._too_long(f", but {e}: shorten the prompt") from None

    async def encode_chat(self, asked: Conversation, limit: Limit | None = None) -> TokenIds:
        """Return the token ids of a conversation, up to the answer's beginning. With `limit`, only the last remain."""
        dated = replace(asked, values={**asked.values, "now": created()})
        return await self._ids(partial(self.codec.chat_ids, dated, limit or Limit(self.max_context)), limit)

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
            raise self._too_long(f", but the request has {len(ids)}")

    def _too_long(self, why: str) -> APIError:
        return APIError(400, f"This model's maximum context length is {self.max_context} tokens{why}")

    def room(self, prompts: list[TokenIds], wanted: int | None) -> None:
        """Raise a 400 if a prompt and the `wanted` tokens after it (None: at least one) exceed the context, or if all
        prompts of the request together have too many tokens."""
        most, total = self._most, sum(map(len, prompts))
        if total > most:
            told = f"a request's prompts may have {most} tokens together, not {total}: send several requests"
            raise APIError(400, told)
        longest = max(map(len, prompts))
        if longest + (1 if wanted is None else wanted) > self.max_context:
            asked = f" and the request asks for {wanted} more: shorten the prompt or lower max_tokens"
            if not wanted:
                asked = ": shorten the prompt" if wanted == 0 else " and the answer needs one more: shorten the prompt"
            raise self._too_long(f"; the prompt has {longest} tokens{asked}")

    def limit(self, body: Truncated) -> Limit | None:
        """Return how many of a prompt's last tokens are kept, or None for all. This is `truncate_prompt_tokens`; -1
        means as many as fit into the context together with the requested new tokens, or with one."""
        most = body.truncate_prompt_tokens
        if most == 0:
            told = "truncate_prompt_tokens must be -1 or at least 1, not 0"
            raise APIError(400, told, param="truncate_prompt_tokens")
        if most == -1:
            most = max(1, self.max_context - (1 if body.wanted is None else body.wanted))
        return None if most is None or most > self.max_context else Limit(most, last=True)

    async def converse(
        self, body: Sampled, asked: Conversation, tools: Tools, write: Callable[..., Writer], *, cut: bool = False
    ) -> Response:
        """Answer a conversation. If the wanted tokens exceed the context, raise a 400 or, with `cut`, generate
        fewer. `write` makes the `Writer`."""
        model, wanted = self.model(body.model), body.wanted
        form = self.codec.constraint(tools.functions, body.form(), required=tools.required, several=tools.several)
        prompt = await self.encode_chat(asked, self.limit(body))
        self.room([prompt], None if cut else wanted)
        left = self.max_context - len(prompt)
        if wanted is None and body.shown is not None:
            choices = (body.n or 1) if isinstance(body, Choices) else 1
            left = min(left, max(1, MAX_LOGPROBS // (choices * (1 + body.shown))))
        params = body.sampling(self.description.sampling, min(left, wanted or left), form)
        reader = partial(self.codec.reader, tools.functions, None if tools.several else 1)
        answers = self.answers([prompt], params, special=reader() is not None)
        return await self.respond(write(model, body, answers, reader, self.tokenizer))

    def answers(self, prompts: list[TokenIds], params: SamplingParams, *, special: bool = False) -> Answers:
        """Submit prompts to the engine, and return their choices (completions). `special` keeps special tokens in the
        text. Raises a 400 if the answer could be too large. Raises EngineDead if the engine has stopped. Raises
        MegakernelError for stop strings without a tokenizer."""
        _check_size(prompts, params)
        replay = REPLAYED.get()
        if self._seeds and params.seed is None and replay is None:
            params = replace(params, seed=self._seeds.getrandbits(64))
        self.codec.check(params)
        make = partial(self.codec.transcripts, params=params, special=special, keeps=False)
        transcripts = [one for prompt in prompts for one in make(prompt)]
        answers = Answers(self.engine, prompts, params, transcripts)
        self.engine.submit(answers, CLIENT.get(), replay.seed if replay else None)
        ANSWERS.get([]).append(answers)
        return answers

    async def respond(self, writer: Writer) -> Response:
        """Return the whole answer, or a stream that begins when the engine has accepted the request. On any failure,
        generation is aborted."""
        answers = writer.answers
        if writer.body.stream:
            await self.finished(answers, answers.accepted())
            response: Response = EventStream(writer, partial(self.finished, answers))
        else:
            response = WholeAnswer(*await self.finished(answers, writer.whole()))
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
            told = (
                f"the answer (of a stream, the first token) took longer than {self.limits.request_timeout:g} s:"
                " ask for fewer tokens or try again later"
            )
            raise APIError(503, told, headers={"Retry-After": "5"}) from None


async def _of_app(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_of_app)]  # the type of a route's parameter that gets the app's service


def _cut(ids: Sequence[int], limit: Limit | None) -> TokenIds:
    return np.array(ids[-limit.most :] if limit and limit.last else ids, np.int32)


def _check_size(prompts: list[TokenIds], params: SamplingParams) -> None:
    """Raise a 400 if the answer could have too many log-probabilities, or too many stop strings to look for."""
    choices, shown = len(prompts) * params.n, 0
    if params.logprobs is not None:
        shown += choices * (params.max_tokens or 0) * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        shown += sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
    if shown > MAX_LOGPROBS:
        raise APIError(
            400,
            f"the answer could have {shown} log-probabilities, but may have only {MAX_LOGPROBS}: ask for fewer choices,"
            " tokens or top log-probabilities",
        )
    if choices * (1 + len(params.stop_strings)) > MAX_WATCHED:
        told = (
            f"{choices} choices with {len(params.stop_strings)} stop strings are too many for one request:"
            f" choices * (stop strings + 1) must be at most {MAX_WATCHED}"
        )
        raise APIError(400, told, param="stop" if params.stop_strings else "prompt")
