"""A minimal client for OpenAI-compatible servers on asyncio streams: HTTP/1.1, keep-alive, server-sent events. It does
no more than the protocol needs, so that the benchmark measures the server and not the client."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import msgspec

from megakernel.errors import MegakernelError
from megakernel.serving.bench.report import Outcome
from megakernel.serving.bench.workload import LoadJob

_MOST_EVENT = 1 << 20  # maximum bytes of a streamed event
_MOST_BYTES = 1 << 26  # maximum bytes of an answer
_SHOWN = 200  # maximum characters of a server's message
_CONNECT_S = 30.0
_READ = 1 << 16
CPU = 'megakernel:cpu_seconds_total{process="'
ERRORS = (OSError, EOFError, ValueError, RecursionError, msgspec.DecodeError)


class RefusedError(MegakernelError):
    """Raised if a server answers with another status than 200. `said` is the server's own message."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            self.said = said(msgspec.json.decode(body, type=dict[str, Any])["error"])
        except (*ERRORS, KeyError):
            self.said = said(body.decode(errors="replace"))
        super().__init__(f"{status}: {self.said}")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    """The fields of an answer, or of a streamed event, that this client reads."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


class ServerClient:
    """One server. `url` may end with `/v1`. `model` is the model name in each request. If it is None, `discover` asks
    the server for a name."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MegakernelError(f"{url!r} is not an http:// or https:// address")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.model = model
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nAccept: */*\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._free: list[_Connection] = []
        self.received = 0  # number of answers and pieces of streams; if it no longer grows, the server is dead

    async def metrics(self) -> dict[str, float]:
        """Return the server's Prometheus metrics by name. Only names that begin with `CPU` keep their labels."""
        found: dict[str, float] = {}
        try:
            lines = (await self.get("/metrics")).decode(errors="replace").splitlines()
        except RefusedError:
            lines = []
        for line in lines:
            name, _, value = line.rpartition(" ")
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := float(value)):
                    found[name if name.startswith(CPU) else name.partition("{")[0]] = number
        return found

    async def discover(self) -> None:
        """Set `model` to the first model that the server lists, unless `model` is set already. Raises MegakernelError
        if the server lists none. Raises RefusedError if the server answers with an error."""
        body = await self.get("/v1/models")
        try:
            self.model = self.model or msgspec.convert(msgspec.json.decode(body)["data"][0]["id"], str)
        except (*ERRORS, LookupError, TypeError):
            raise MegakernelError(f"{self.url}/v1/models names no model: is this an OpenAI API?") from None

    async def get(self, path: str) -> bytes:
        """Return the answer to a GET request. Raises RefusedError if the server answers with an error. Raises
        MegakernelError if the server does not answer."""
        try:
            return await self._whole("GET", path, b"")
        except ERRORS as e:
            raise MegakernelError(f"{self.url} does not answer: {e or type(e).__name__}; is the server up?") from e

    async def post(self, path: str, request: dict[str, Any]) -> bytes:
        """Return the answer to a POST request. Raises RefusedError, and one of ERRORS if the server does not answer."""
        return await self._whole("POST", path, json.dumps(request).encode())

    async def events(self, path: str, request: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Send a POST request, and yield the data of each event of the streamed answer, except the last, `[DONE]`.
        Raises RefusedError if the server refuses the request, and one of ERRORS if the answer is cut short."""
        held, done = b"", False
        async with self._answer("POST", path, json.dumps(request).encode()) as connection:
            async for piece in connection.body():
                self.received += 1
                *events, held = (held + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                if len(held) > _MOST_EVENT:
                    raise ValueError(f"the server streamed an event of more than {_MOST_EVENT} bytes")
                for event in events:
                    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                    done = done or data == b"[DONE]"
                    if data and not done:
                        yield data
        if not done:
            raise EOFError("the stream ended without [DONE]")

    async def complete(self, job: LoadJob, *, stream: bool = True) -> Outcome:
        """Send one completion request and read the answer: the token usage, and for a stream the arrival time of each
        event with `choices`. A failure is returned as an outcome with `error`."""
        request: dict[str, Any] = {
            "model": self.model,
            "prompt": job.prompt if isinstance(job.prompt, str) else job.prompt.tolist(),
            "max_tokens": job.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": stream,
        }
        outcome = Outcome(job, perf_counter())
        try:
            if stream:
                request["stream_options"] = {"include_usage": True}
                async for data in self.events("/v1/completions", request):
                    now, message = perf_counter(), _decode(data)
                    if message.error:
                        outcome.error = said(message.error)
                    if message.choices:
                        outcome.moments.append(now)
                    _read_usage(message, outcome)
            else:
                _read_usage(_decode(await self.post("/v1/completions", request)), outcome)
        except RefusedError as e:
            outcome.error = str(e)
        except ERRORS as e:
            outcome.error = outcome.error or f"{type(e).__name__}: {e}"
        self.received += 1
        outcome.end = perf_counter()
        return outcome

    async def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def _whole(self, method: str, path: str, body: bytes) -> bytes:
        async with self._answer(method, path, body) as connection:
            return b"".join([piece async for piece in connection.body()])

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: bytes) -> AsyncIterator[_Connection]:
        """Send a request and yield the connection, whose `body` reads the answer. Raises RefusedError as `get` does."""
        connection, status = await self._ask(method, path, body)
        try:
            if status != 200:
                raise RefusedError(status, b"".join([piece async for piece in connection.body()]))
            yield connection
        except RefusedError:
            self._give(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give(connection)

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[_Connection, int]:
        """Send a request on a free or new connection, and read the status and headers of the answer."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = f"{head}\r\n".encode() + body
        while self._free:
            connection = self._free.pop()
            try:
                return connection, await connection.ask(data)
            except (OSError, EOFError):
                connection.close()  # the server had closed this connection while it was idle
        opened = asyncio.open_connection(self._host, self._port, ssl=self._tls)
        connection = _Connection(*await asyncio.wait_for(opened, _CONNECT_S))
        try:
            return connection, await connection.ask(data)
        except BaseException:
            connection.close()
            raise

    def _give(self, connection: _Connection) -> None:
        if connection.reusable:
            self._free.append(connection)
        else:
            connection.close()


class _Connection:
    """One HTTP/1.1 connection. `reusable` is True after an answer if the server keeps the connection open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import httptools  # only here, because a machine that computes without a server may lack it

        self._http, self._reader, self._writer = httptools, reader, writer
        self.reusable = False

    async def ask(self, data: bytes) -> int:
        """Send `data` and return the status of the answer."""
        self._parser = self._http.HttpResponseParser(self)  # calls the methods on_*
        self._received, self._pieces = 0, list[bytes]()
        self._begun = self._sized = self._ended = self.reusable = False
        self._writer.write(data)
        await self._writer.drain()
        while not self._begun:
            await self._read()
        return self._parser.get_status_code()

    async def body(self) -> AsyncIterator[bytes]:
        while self._pieces or not self._ended:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if not self._ended:
                await self._read()

    async def _read(self) -> None:
        data = await self._reader.read(_READ)
        self._received += len(data)
        if self._received > _MOST_BYTES:
            raise ValueError(f"an answer exceeds the benchmark's limit of {_MOST_BYTES} bytes")
        if data:
            try:
                self._parser.feed_data(data)
            except self._http.HttpParserError as e:
                raise ValueError(str(e)) from e
        elif self._sized or not self._begun:
            raise EOFError("the server closed the connection before the end of its answer")
        else:
            self._ended = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self._ended, self.reusable = True, self._parser.should_keep_alive()

    def close(self) -> None:
        self._writer.close()


def _read_usage(message: _Answer, outcome: Outcome) -> None:
    if (usage := message.usage) is not None:
        outcome.prompt_tokens = usage.prompt_tokens or outcome.prompt_tokens
        outcome.output_tokens = usage.completion_tokens or outcome.output_tokens


def said(error: Any) -> str:
    """Return the message of an error that a server reports, at most _SHOWN characters of it."""
    text = str((isinstance(error, dict) and error.get("message")) or error)[: 2 * _SHOWN]
    text = str(MegakernelError(" ".join(text.split())))  # without control characters
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
