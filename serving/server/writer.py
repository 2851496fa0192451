"""Writes answers: whole, or as streams of server-sent events. Both are made of the same pieces (text, reasoning, calls
of tools). Each API has its own `Writer`.

If the server that gives an answer is lost, another one continues it. Results do not depend on the batch, so a server
that gets the same request with the same random seed generates the same tokens, bit for bit. The front, which passes
requests to servers, adds the header HEADER to each request, with a `Replay`. A server honours the header only with the
key in the environment variable KEY, which only the front's processes know. Such an answer has separate events for each
token, so the events do not depend on how many tokens arrive at once. After the events of a token comes a mark with the
number of the choice. By counting the marks, the front knows which tokens the client has. A server that gets the request
again leaves out the events of these tokens."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.errors import ClientGone, as_api_error, is_messages
from megakernel.serving.server.requests import Choices
from megakernel.serving.server.scores import Pieces, append, chat_logprobs, prompt_logprobs
from megakernel.serving.text.tool_calls import Piece, Reader

log = logging.getLogger(__name__)
T = TypeVar("T")
AnyReason = Literal["stop", "length", "tool_calls"]
DIRECT = "megakernel.send"  # key of the ASGI scope for the server's own `send`, which bypasses all middleware
HALF_CLOSED = "megakernel.half_closed"  # key of the scope that says that the client has stopped sending
PROBE_SECONDS = 0.5  # between two writes that show whether a client that has stopped sending is still there
SILENCE = 10.0  # Seconds without an event until a stream sends a comment. Proxies give up after 30 s or more.
WAITING = b": waiting\n\n"
_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a placeholder for the text of a chunk, see `_text_event`, and for lists
_LIST = re.compile(rf'"{_MARK}(\d+)"'.encode())
_LARGE = 1 << 18  # bytes of an answer that are sent before other clients have their turn


def encode_json(value: object) -> bytes:
    """Return a value as JSON. The fast encoder cannot write integers beyond 64 bits, so another one writes these."""
    try:
        return _encode(value)
    except OverflowError:
        return json.dumps(value).encode()


def json_response(value: object) -> Response:
    return Response(encode_json(value), media_type="application/json")


# -- the same answer from another server

HEADER, KEY = "x-megakernel-replay", "MEGAKERNEL_REPLAY_KEY"
# A mark: an SSE comment that names the choice of the events before it. No event contains one: JSON has no line breaks.
MARK = re.compile(rb"^:(\d+)\n\n", re.MULTILINE)


class Replay(msgspec.Struct):
    """What servers need to give the same answer."""

    seed: int  # from which random numbers and ids are derived
    created: int  # the time when the answer began, in seconds since 1970
    given: dict[int, int] = {}  # choice -> the number of tokens whose events the client already has

    def header(self, key: str) -> str:
        return f"{key} {msgspec.json.encode(self).decode()}"


class Replayed(Replay):
    """An answer that begins after the tokens that the client already has."""

    passed: dict[int, int] = {}  # choice -> number of its tokens generated so far
    at: str = ""  # the current token: its choice, and its number within the choice
    ids: int = 0  # the number of ids that the events of the current token have so far

    def events(self, make: Callable[[Delta], bytes], delta: Delta) -> bytes:
        """Return the stream events for a choice's next token, `delta`, followed by a MARK. Return nothing if the client
        has this token already. `make` makes the events and is called in both cases, because later events depend on
        earlier ones."""
        count = self.passed[delta.index] = self.passed.get(delta.index, 0) + 1
        self.at, self.ids = f"{delta.index} {count}", 0
        events = make(delta)
        return b"" if count <= self.given.get(delta.index, 0) else b"%s:%d\n\n" % (events, delta.index)

    def new_id(self) -> str:
        """Return an id that depends on the seed and the current token only."""
        self.ids += 1
        return hashlib.blake2b(f"{self.seed} {self.at} {self.ids}".encode(), digest_size=12).hexdigest()


REPLAYED: ContextVar[Replayed | None] = ContextVar("replayed", default=None)  # of the request being answered


def replayed(header: bytes | None) -> Replayed | None:
    """Parse the header that says how to continue another server's answer. None: it is missing or its key is wrong."""
    key, _, asked = (header or b"").partition(b" ")
    known = os.environ.get(KEY, "").encode()
    if not known or not hmac.compare_digest(key, known):
        return None
    return msgspec.json.decode(asked, type=Replayed)


def new_id() -> str:
    """Return the id of an answer or of a part of it: 24 random hexadecimal digits."""
    asked = REPLAYED.get()
    return asked.new_id() if asked else secrets.token_hex(12)


def created() -> int:
    """Return the time at which the request that is being answered began, in seconds since 1970."""
    asked = REPLAYED.get()
    return asked.created if asked else int(time.time())


# -- the pieces of an answer


@dataclass
class Item:
    """A part of an answer: text for the user, reasoning, or a call of a function."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""  # of a call: the arguments
    name: str = ""  # of the function
    id: str = field(default_factory=new_id)


class Said:
    """What one choice has said so far, as items. `reader` divides its text into pieces; None: all text is content."""

    def __init__(self, delta: Delta, reader: Reader | None) -> None:
        self.index, self.prompt, self.reader = delta.index, delta.prompt, reader
        self.items: list[Item] = []
        self.calls = 0  # number of items that are calls
        self.scores: Pieces = {}  # the log-probabilities that the whole answer shows
        self.last = delta  # the newest delta; the last one says why the choice has ended

    def read(self, delta: Delta) -> list[Piece]:
        """Return the pieces of new text."""
        self.last = delta
        if self.reader is None:
            return [Piece("content", delta.text)]
        return self.reader.add(delta.text, delta.finish_reason)

    def put(self, piece: Piece) -> bool:
        """Append a piece to the last item, or begin a new item with it. Returns whether a new item has begun."""
        if piece.kind == "arguments" or (piece.kind != "call" and self.items and self.items[-1].kind == piece.kind):
            self.items[-1].text += piece.text
        elif piece.kind == "call":
            self.calls += 1
            self.items.append(Item("call", name=piece.text))
            return True
        else:
            self.items.append(Item(piece.kind, piece.text))
            return True
        return False

    def text(self, kind: Literal["content", "reasoning"]) -> str:
        return "".join(item.text for item in self.items if item.kind == kind)

    @property
    def reason(self) -> AnyReason | None:
        """Why the choice has ended. A call that max_tokens cut off must not look complete: the reason is `length`."""
        return "tool_calls" if self.calls and self.last.finish_reason == "stop" else self.last.finish_reason


MakeReader = Callable[[], Reader | None]


class Writer(ABC):
    """Writes the answer to one request as JSON. `head` has the answer's id, its creation time and the model's
    name. `last` is the final event of a stream. `filler` is sent while the stream has no event. The answer's id
    begins with `kind`."""

    last = b"data: [DONE]\n\n"
    filler = WAITING
    kind = ""
    objects = ("", "")  # what an answer of choices and a chunk of it are called
    reasons = True  # whether the answer shows reasoning

    def __init__(
        self, model: str, body: Any, answers: Answers, reader: MakeReader, tokenizer: Tokenizer | None
    ) -> None:
        """`body` is the request, in which the model is called `model`. `reader` makes a parser for the text of one
        choice; its result is None if all text is content. Without the model's `tokenizer`, answers have token ids."""
        asked = body if isinstance(body, Choices) else Choices()
        self.body, self.answers, self.tokenizer = body, answers, tokenizer
        self._readers = [reader() for _ in answers.transcripts]  # by the number of the choice
        # Shows tokens as text. Without it, they are shown as `token_id:N`.
        self._shown_by = None if asked.return_tokens_as_token_ids else tokenizer
        self._shows_ids = tokenizer is None or bool(asked.return_token_ids)
        self._keeps = self._shows_ids or body.shown is not None  # whether the answer shows single tokens
        self._scored = asked.prompt_logprobs
        self._usage_last = bool(asked.stream_options and asked.stream_options.include_usage)
        self._prompts: dict[int, Pieces] = {}  # number of a prompt -> its log-probabilities
        self._lists_left: list[bytearray] = []  # lists that are still to be put into the JSON
        self.head: dict[str, Any] = {"id": f"{self.kind}-{new_id()}", "created": created(), "model": model}
        self._said: dict[int, Said] = {}  # by the number of the choice
        self._around: dict[int, list[bytes]] = {}  # choice -> the JSON of a chunk before and after its text

    async def whole(self) -> list[bytes | bytearray]:
        """Return the JSON of the whole answer, in pieces. The text is the same as in a stream."""
        while not self.answers.finished:
            for delta in await self.answers.take():
                await self._prepare(delta)
                said = self._choice(delta)
                for piece in said.read(delta):
                    if piece.text and (self.reasons or piece.kind != "reasoning"):
                        said.put(piece)
                if lists := self._lists(delta):
                    append(said.scores, lists)
        return self._filled(self._whole([self._said[index] for index in sorted(self._said)]))

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream, except the final `last`. If another server could continue the answer, yield
        one item per token, even if the token has no new event."""
        replay = REPLAYED.get()
        make = partial(replay.events, self._events) if replay else self._events
        while not self.answers.finished:
            deltas = await self.answers.take(singly=bool(replay))
            for delta in deltas:
                await self._prepare(delta)
            events = self._filled(b"".join(map(make, deltas)))
            for part in [b"".join(events)] if replay else in_parts(events):
                yield part
        if self._usage_last:
            yield event(self._json([], self._usage()))

    def _choice(self, delta: Delta) -> Said:
        if (said := self._said.get(delta.index)) is None:
            said = self._said[delta.index] = Said(delta, self._readers[delta.index])
        return said

    async def _prepare(self, delta: Delta) -> None:
        """Encode the prompt's log-probabilities as JSON when the first token of any of its choices arrives."""
        index, count = delta.prompt, self._scored
        if count is not None and index not in self._prompts:
            prompt, (_, tops) = self.answers.prompts[index].tolist(), self.answers.scores[index]
            self._prompts[index] = await prompt_logprobs(self._shown_by, prompt, tops, count)

    def _written(self, pieces: Pieces) -> dict[str, list[str]]:
        """Return placeholders, which `_filled` replaces, because encoding long lists would delay other clients."""
        self._lists_left += pieces.values()
        return {name: [f"{_MARK}{at}"] for at, name in enumerate(pieces, len(self._lists_left) - len(pieces))}

    def _filled(self, data: bytes) -> list[bytes | bytearray]:
        """Replace the placeholders in `data` (JSON or events) by the lists of `_written`. Returns the pieces."""
        pieces: list[bytes | bytearray] = [*_LIST.split(data)] if self._lists_left else [data]
        pieces[1::2] = [self._lists_left[int(number)] for number in pieces[1::2]]
        self._lists_left.clear()
        return pieces

    def _lists(self, delta: Delta) -> dict[str, list[Any]]:
        """Return the lists of log-probabilities that an answer shows for new tokens."""
        count = self.body.shown
        return {} if count is None else {"content": chat_logprobs(self._shown_by, delta.tokens, count)}

    @abstractmethod
    def _events(self, delta: Delta) -> bytes:
        """Return the events that report the new part of a choice."""

    @abstractmethod
    def _whole(self, choices: list[Said]) -> bytes:
        """Return as JSON the whole answer, which consists of `choices`."""

    def _json(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, *, whole: bool = False, **more: Any
    ) -> bytes:
        """Return JSON with `choices`: the whole answer if `whole` is set, otherwise one chunk of a streamed answer."""
        return encode_json({**self.head, "object": self.objects[not whole], "choices": choices, "usage": usage, **more})

    def _plain(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice of a chunk that contains only new text."""
        raise NotImplementedError

    def _text_event(self, index: int, text: str) -> bytes:
        """Return a choice's text as an event. To save time, the JSON around the text is made only once per choice."""
        if (around := self._around.get(index)) is None:
            around = event(self._json([self._plain(index, _MARK)])).split(f'"{_MARK}"'.encode())
            self._around[index] = around
        before, after = around
        return before + encode_json(text) + after

    def _usage(self) -> dict[str, Any]:
        """Return the token counts. `cached_tokens` counts the prompt tokens that were found in the prefix cache."""
        prompt, made = self.answers.prompt_tokens, self.answers.completion_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return {**counts, "prompt_tokens_details": {"cached_tokens": self.answers.cached}}


class ItemWriter(Writer):
    """Writes an answer of one choice, in APIs whose streams report the beginning, growth and end of each item.
    Reasoning is left out. `said` is the answer so far; its last item may still grow until it is closed."""

    last = b""  # these streams have an event of their own for the end
    reasons = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.said = self._said[0] = Said(Delta(0, 0), self._readers[0])
        self._begun = False

    def _events(self, delta: Delta) -> bytes:
        said, events = self.said, [b"" if self._begun else self._begin()]
        self._begun = True
        for piece in said.read(delta):
            if piece.kind == "reasoning" or not (piece.text or self._keeps):
                continue
            if said.put(piece):
                events += [self._close(item) for item in said.items[-2:-1]]
                events.append(self._open(said.items[-1]))
            if piece.kind != "call":
                events.append(self._grow(said.items[-1], piece.text, delta))
        if delta.finish_reason is not None:
            events.append(self._end())
        return b"".join(events)

    @abstractmethod
    def _begin(self) -> bytes:
        """Return the first events of the stream."""

    @abstractmethod
    def _open(self, item: Item) -> bytes:
        """Return the events for the beginning of an item, without its text."""

    @abstractmethod
    def _grow(self, item: Item, text: str, delta: Delta) -> bytes:
        """Return the events for more text, or more arguments, of the last item."""

    @abstractmethod
    def _close(self, item: Item) -> bytes:
        """Return the events for the end of an item."""

    @abstractmethod
    def _end(self) -> bytes:
        """Return the last events of the stream, from the end of the last item on."""


# -- server-sent events and the client's connection


def event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event with the content `data`, and with `name` as its name unless that is empty."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


class EventStream(Response):
    """A response of server-sent events, which `writer` writes. Its status is sent at once, so an error is sent as an
    event. `timed` limits the wait for the first event. After each SILENCE without events, a comment or, in Anthropic's
    API, a ping is sent. At the end, the answers are closed."""

    media_type = "text/event-stream"

    def __init__(self, writer: Writer, timed: Callable[[Awaitable[bytes]], Awaitable[bytes]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._writer, self._timed, self._parts = writer, timed, 0
        self._waits = False  # whether nothing is being sent now, so that a filler cannot come within an event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # Middleware changes only the start of a response. To save time, the many parts of a stream bypass it.
            await while_connected(receive, self._send(scope, scope.get(DIRECT, send)))
        finally:
            self._writer.answers.close()

    async def _send(self, scope: Scope, send: Send) -> None:
        last, chunks = b"", self._writer.chunks()
        beside = asyncio.ensure_future(self._fill_silence(scope, send))
        try:
            self._waits = True
            part: bytes | None = await self._timed(anext(chunks))
            while part is not None:
                self._waits, self._parts = False, self._parts + 1
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self._waits = True
                part = await anext(chunks, None)
        except Exception as e:
            error = as_api_error(e)
            if error.status == 503 and REPLAYED.get():
                return  # the body is incomplete, so the front asks another replica for the rest
            if error.status == 500:
                log.exception("a stream failed")
            last = event(error.body(scope["path"]), "error" if is_messages(scope["path"]) else "")
        finally:
            beside.cancel()
        await send({"type": "http.response.body", "body": last + self._writer.last, "more_body": False})

    async def _fill_silence(self, scope: Scope, send: Send) -> None:
        filler = WAITING if REPLAYED.get() else self._writer.filler
        while True:
            before, silent = self._parts, 0.0
            while silent < (PROBE_SECONDS if HALF_CLOSED in scope else SILENCE):
                await asyncio.sleep(min(PROBE_SECONDS, SILENCE))
                silent += PROBE_SECONDS
            if self._parts == before and self._waits:
                await send({"type": "http.response.body", "body": filler, "more_body": True})


def in_parts(pieces: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """Join and cut pieces into parts of _LARGE bytes; the last may be smaller. Without bytes there is no part."""
    part = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), _LARGE):
            part += memoryview(piece)[at : at + _LARGE]
            if len(part) >= _LARGE:
                yield bytes(part[:_LARGE])
                del part[:_LARGE]
    if part:
        yield bytes(part)


class WholeAnswer(Response):
    """A complete JSON response, sent in parts, so that other tasks of the event loop can run. `pieces` make up its
    content."""

    def __init__(self, *pieces: bytes | bytearray) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in in_parts(self._pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client closes the connection first, cancel `work` and raise ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
