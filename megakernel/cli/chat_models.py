"""The two kinds of partner in `megakernel chat`: a model in this process, or an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from ..errors import MegakernelError

if TYPE_CHECKING:
    from megakernel.serving import LLM, SamplingParams
    from megakernel.serving.text.codec import Token

Messages = list[dict[str, str]]
T = TypeVar("T")
_SILENCE_S = 300.0  # seconds without data from a server after which the connection counts as lost
_SHOWN = 300  # maximum characters that an error shows of an answer that cannot be decoded
_MOST_LINE = 1 << 20  # maximum bytes of one event of a streamed answer
_MOST_BYTES = 1 << 28  # maximum bytes of an answer


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """The fields that this program reads from a streamed event of a chat completion."""

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
    _pieces: list[str] = field(default_factory=list)
    _began: float = field(default_factory=perf_counter)
    _first: float | None = None
    _last: float = 0.0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._last = perf_counter()
        self._first = self._first or self._last

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def ttft_s(self) -> float | None:
        return None if self._first is None else self._first - self._began

    @property
    def tpot_s(self) -> float | None:
        if self._first is None or self.tokens is None or self.tokens < 2:
            return None
        return (self._last - self._first) / (self.tokens - 1)


class Partner(Protocol):
    """A conversation partner, which answers messages: a model or a server. `name` is shown before its answers."""

    name: str

    def count(self, messages: Messages) -> tuple[int, int] | None:
        """Return the number of tokens of the conversation, and the context's maximum for the conversation and its
        answer together. The result is None if these numbers are unknown."""

    def reply(
        self, messages: Messages, answer: PartialAnswer, show: Callable[[str], None], max_tokens: int | None
    ) -> None:
        """Answer the last message. Each piece of text is added to `answer` and passed to `show` when it arrives. If
        Ctrl-C (KeyboardInterrupt) ends the answer, `answer` keeps the pieces so far."""


class LocalModel:
    """A model whose engine runs in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.name, self._llm, self._params = llm.model, llm, params
        llm.get_tokenizer()  # raises an error if the model has no tokenizer

    def count(self, messages: Messages) -> tuple[int, int]:
        return len(self._llm.chat_ids(messages)), self._llm.engine.dims.bucket.max_context

    def reply(
        self, messages: Messages, answer: PartialAnswer, show: Callable[[str], None], max_tokens: int | None
    ) -> None:
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
    """Delay Ctrl-C within the block, so that no step of the engine is interrupted. The block calls the yielded function
    between two steps. If Ctrl-C was pressed, the function raises KeyboardInterrupt."""
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class _RefusedError(MegakernelError):
    """Raised if the server answers a request with an HTTP error."""


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, without the API key if they lead to another server."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new and urlsplit(new.full_url)[:2] != urlsplit(req.full_url)[:2]:
            new.remove_header("Authorization")
        return new


class RemoteModel:
    """A server with the OpenAI API at `url`, with or without `/v1` at the end. `model` is one of the server's model
    names; None means its first model."""

    def __init__(self, url: str, model: str | None, key: str | None, temperature: float | None) -> None:
        from megakernel.serving.bench.client import ModelNames

        given = url if "//" in url else f"http://{url}"
        if not given.startswith(("http://", "https://")):
            raise MegakernelError(f"{url!r} is not an http:// or https:// address")
        self._url = given.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._how = {} if temperature is None else {"temperature": temperature}
        self._context: int | None = None
        with self._ask("/v1/models") as reply:
            try:
                names = [one.id for one in _decoded(reply.read(_MOST_LINE), ModelNames).data]
                self.name = model or names[0]
            except (MegakernelError, IndexError):
                raise MegakernelError(f"{self._url}/v1/models names no model: is this an OpenAI API?") from None

    def count(self, messages: Messages) -> tuple[int, int] | None:
        """Ask the server for the numbers that the method `count` of Partner returns. Only megakernel and vLLM have the
        path `/tokenize`. A server may refuse a conversation that is too long."""
        try:
            with self._ask("/tokenize", {"model": self.name, "messages": messages}) as reply:
                found = _decoded(reply.read(_MOST_LINE), _Count)
                self._context = found.max_model_len
                return found.count, found.max_model_len
        except _RefusedError:
            return (self._context + 1, self._context) if self._context and len(messages) > 1 else None
        except MegakernelError:
            return None

    def reply(
        self, messages: Messages, answer: PartialAnswer, show: Callable[[str], None], max_tokens: int | None
    ) -> None:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= self._how | ({} if max_tokens is None else {"max_tokens": max_tokens})
        with self._ask("/v1/chat/completions", body) as reply:
            for event in _events(reply):
                if event.error is not None:
                    raise MegakernelError(_message(event.error))
                for choice in event.choices or ():
                    if choice.delta and (text := choice.delta.content):
                        answer.add(text)
                        show(text)
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
                if event.usage:
                    answer.tokens = event.usage.completion_tokens
        if answer.finish_reason == "stopped":
            raise MegakernelError(f"{self._url} ended its answer in the middle")

    @contextmanager
    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Yield the response to a request (a POST if there is a `body`). Raises MegakernelError with the server's own
        message if the server reports an error, or if it does not respond."""
        data = None if body is None else json.dumps(body).encode()
        try:
            try:
                asked = Request(self._url + path, data, self._headers)
                with build_opener(_Redirects).open(asked, timeout=_SILENCE_S) as reply:
                    yield reply
            except HTTPError as e:
                raise _RefusedError(_message(_error_in(e.read(_MOST_LINE)))) from None
        except (OSError, ValueError, OverflowError, http.client.HTTPException) as e:
            why = getattr(e, "reason", None) or e or type(e).__name__
            raise MegakernelError(f"the request to {self._url} failed: {why}") from e


def _decoded(data: bytes, kind: type[T]) -> T:
    """Decode JSON as the type `kind`. Raises MegakernelError if it is invalid, too deep, or of another type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise MegakernelError(f"the server sent {data[:_SHOWN]!r}, which is no valid answer: {e}") from None


def _events(reply: http.client.HTTPResponse) -> Iterator[_Event]:
    """Yield the server-sent events of a streamed answer, except the last event `[DONE]`."""
    size = 0
    while line := reply.readline(_MOST_LINE):
        size += len(line)
        if len(line) == _MOST_LINE or size > _MOST_BYTES:
            raise MegakernelError(
                f"the server's answer has more than {_MOST_BYTES} bytes, or a line of more than {_MOST_LINE}: is it one"
                " of this API?"
            )
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            yield _decoded(data, _Event)


def _error_in(body: bytes) -> Any:
    """Return the field `error` of the JSON object `body`, or `body` as text if it has none."""
    try:
        return _decoded(body, dict[str, Any])["error"]
    except (MegakernelError, KeyError):
        return body.decode(errors="replace")


def _message(error: Any) -> str:
    """Return the message of a server's error, or the beginning of its text if it has no message."""
    said = error.get("message") if isinstance(error, dict) else error
    return f"the server says: {str(said or error)[:_SHOWN]}"
