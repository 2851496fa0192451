"""A minimal client for OpenAI-compatible servers on asyncio streams: HTTP/1.1, keep-alive, server-sent events. It does
no more than the protocol needs, so that the benchmark measures the server and not the client."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import msgspec

from megakernel.errors import MegakernelError
from megakernel.serving.bench.report import Outcome
from megakernel.serving.bench.workload import LoadJob

_LINE_LIMIT = 1 << 20  # maximum bytes of a line, of all headers and of a streamed event
_MOST_BYTES = 1 << 26  # maximum bytes of an answer
_CONNECT_S = 30.0
_READ = 1 << 16
CPU = 'megakernel:cpu_seconds_total{process="'
_ERRORS = (OSError, EOFError, ValueError, asyncio.LimitOverrunError, RecursionError, msgspec.DecodeError)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    """The fields of an answer, or of a streamed event, that this client reads."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class ModelNames(msgspec.Struct):
    """The fields that this package reads in a server's answer to `GET /v1/models`."""

    data: list[_Model]


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
        self.events = 0  # number of answers and streamed events received; if it no longer grows, the server is dead

    async def metrics(self) -> dict[str, float]:
        """Return the server's Prometheus metrics by name. Labels are left out, except the process of `CPU`."""
        _, body = await self.get("/metrics")
        found: dict[str, float] = {}
        for line in body.decode(errors="replace").splitlines():
            name, _, value = line.rpartition(" ")
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := float(value)):
                    found[name if name.startswith(CPU) else name.partition("{")[0]] = number
        return found

    async def discover(self) -> None:
        """Set `model` to the first model that the server lists, unless `model` is set already."""
        status, body = await self.get("/v1/models")
        try:
            self.model = self.model or msgspec.json.decode(body, type=ModelNames).data[0].id
        except (*_ERRORS, IndexError):
            raise MegakernelError(
                f"{self.url}/v1/models answered {status} without a model name: {_short(body)}"
            ) from None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request. Returns (status, body). Raises MegakernelError if the server does not answer."""
        try:
            connection, status = await self._ask("GET", path, b"")
            body = b"".join([piece async for piece in connection.body()])
        except _ERRORS as e:
            raise MegakernelError(f"{self.url} does not answer: {e or type(e).__name__}; is the server up?") from e
        self._give(connection)
        return status, body

    async def get_json(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object at `path`, or None if the server does not return one."""
        status, body = await self.get(path)
        try:
            found = msgspec.json.decode(body) if status == 200 else None
        except _ERRORS:
            return None
        return found if isinstance(found, dict) else None

    async def complete(self, job: LoadJob, *, stream: bool = True) -> Outcome:
        """Send one completion request and read the answer. A failure is returned as an outcome with `error`."""
        request: dict[str, Any] = {
            "model": self.model,
            "prompt": job.prompt if isinstance(job.prompt, str) else job.prompt.tolist(),
            "max_tokens": job.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            request["stream_options"] = {"include_usage": True}
        body = json.dumps(request).encode()
        outcome = Outcome(job, perf_counter())
        try:
            connection, status = await self._ask("POST", "/v1/completions", body)
            try:
                if status != 200:
                    outcome.error = f"{status}: {_short(b''.join([piece async for piece in connection.body()]))}"
                elif stream:
                    await self._read_events(connection, outcome)
                else:
                    _read_usage(_decode(b"".join([piece async for piece in connection.body()])), outcome)
            except BaseException:
                connection.close()
                raise
            self._give(connection)
        except _ERRORS as e:
            outcome.error = f"{type(e).__name__}: {e}"
        self.events += 1
        outcome.end = perf_counter()
        return outcome

    async def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def _read_events(self, connection: _Connection, outcome: Outcome) -> None:
        """Read a streamed completion. Record the token usage and the arrival time of each event with `choices`."""
        held, done = b"", False
        async for piece in connection.body():
            now = perf_counter()
            self.events += 1
            *events, held = (held + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            if len(held) > _LINE_LIMIT:
                raise ValueError(f"an event has more than {_LINE_LIMIT} bytes")
            for event in events:
                data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                if data == b"[DONE]":
                    done = True
                elif data:
                    message = _decode(data)
                    if message.error:
                        outcome.error = _short(data)
                    if message.choices:
                        outcome.moments.append(now)
                    _read_usage(message, outcome)
        if not done and outcome.error is None:
            outcome.error = "the stream ended without [DONE]"

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
        opened = asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_LINE_LIMIT)
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
    """One HTTP/1.1 connection. `reusable` becomes True when the body of an answer has been read to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers: dict[str, str] = {}
        self._received = 0  # bytes of the answer so far
        self.reusable = False

    async def ask(self, data: bytes) -> int:
        """Send `data` and return the status of the answer."""
        self.reusable, self._received = False, 0
        self._writer.write(data)
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in head[1:] if ":" in line)
        self._headers = {name.lower(): value.strip() for name, value in pairs}
        try:
            return int(head[0].split()[1])
        except IndexError:
            raise ValueError(f"{head[0][:200]!r} is no status line") from None

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body of an answer in pieces as they arrive, with or without HTTP's chunked encoding."""
        headers, reader = self._headers, self._reader
        sized = True
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while left := int((await self._line()).split(b";")[0], 16):
                async for piece in self._pieces(left):
                    yield piece
                await reader.readexactly(2)
            while await self._line() != b"\r\n":
                pass
        elif "content-length" in headers:
            async for piece in self._pieces(int(headers["content-length"])):
                yield piece
        else:
            sized = False
            while piece := await reader.read(_READ):
                self._count(len(piece))
                yield piece
        self.reusable = sized and headers.get("connection", "").lower() != "close"

    async def _pieces(self, left: int) -> AsyncIterator[bytes]:
        """Yield the next `left` bytes of the connection, in pieces as they arrive."""
        while left > 0:
            piece = await self._reader.read(min(left, _READ))
            if not piece:
                raise EOFError("the connection closed before the end of the answer")
            self._count(len(piece))
            left -= len(piece)
            yield piece

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line:
            raise EOFError("the connection closed before the end of the answer")
        self._count(len(line))
        return line

    def _count(self, size: int) -> None:
        self._received += size
        if self._received > _MOST_BYTES:
            raise ValueError(f"an answer has more than {_MOST_BYTES} bytes")

    def close(self) -> None:
        self._writer.close()


def _read_usage(message: _Answer, outcome: Outcome) -> None:
    if (usage := message.usage) is not None:
        outcome.prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else outcome.prompt_tokens
        outcome.output_tokens = (
            usage.completion_tokens if usage.completion_tokens is not None else outcome.output_tokens
        )


def _short(body: bytes) -> str:
    text = str(MegakernelError(" ".join(body[:2000].decode(errors="replace").split())))  # without control characters
    return text if len(text) <= 200 else f"{text[:200]}..."
