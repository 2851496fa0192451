"""The HTTP/1.1 protocol of one connection, based on uvicorn's: what a client may send, and when the server closes
it."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from megakernel.serving.server.errors import APIError
from megakernel.serving.server.writer import HALF_CLOSED, PROBE_SECONDS

# Maximum bytes of a request's header: its request line and all header fields.
_MOST_HEAD = 1 << 16
# bytes added to the size of each header field, as in HTTP/2, because a short one takes as long to parse as a long one
_FIELD = 32
_TLS_END = 1.0  # seconds in which an idle client may end TLS when the server stops
_MOST_WAITING = 128  # maximum number of requests on a connection that wait behind the one being answered

# uvicorn warns about every request that is not valid HTTP, so any client could fill the log.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class _TooMuch(Exception):
    pass


class HttpProtocol(HttpToolsProtocol):
    """The HTTP/1.1 protocol of one connection, with errors as JSON and a limit on the size of a header. It closes the
    connection if no complete header arrives within `timeout_keep_alive` seconds. The time counts from the end of the
    last answer, or from the beginning of a new connection. It also closes the connection, after the answers to earlier
    requests, if more than _MOST_WAITING requests arrive before their turn."""

    _head = 0  # bytes of the current header so far
    _data = b""  # the bytes that arrived last
    _keeps_alive = True  # whether the client wants to use the connection again
    _answering: RequestResponseCycle | None = None  # the request that is answered; uvicorn's `cycle` is the latest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection, or let its request be answered first. An idle client may never answer the
        notice that ends TLS, and asyncio would wait 30 s for the answer."""
        sent = not self.transport.get_write_buffer_size()
        super().shutdown()
        if sent and self.transport.is_closing():
            self.loop.call_later(_TLS_END, self.transport.abort)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has only closed its writing side, and then close the connection."""
        cycle = self._answering
        if cycle is None or cycle.response_complete or cycle.scope["http_version"] != "1.1" or self.scheme == "https":
            return False
        cycle.keep_alive = False
        cycle.scope[HALF_CLOSED] = True  # type: ignore[literal-required]
        self._probe(cycle)
        return True

    def _probe(self, cycle: RequestResponseCycle) -> None:
        """Send an interim answer from time to time until the answer begins. If the client has left, its system replies
        with a reset, without which the server would not notice. Event streams send comments instead."""
        if not (cycle.response_started or self.transport.is_closing()):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(PROBE_SECONDS, self._probe, cycle)

    def data_received(self, data: bytes) -> None:
        # Hide the timer from uvicorn's own method, which would cancel it at the first byte of a header.
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        self._data = data
        super().data_received(data)
        self._data = b""
        if waiting is None:
            return
        # Keep the timer if no answer is due: a header is incomplete, or the body of a refused request is arriving.
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = waiting
        else:
            waiting.cancel()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _FIELD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MOST_WAITING:
            raise _TooMuch
        super().on_headers_complete()
        self._head = 0
        if self.cycle is not None:
            self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, True

    def on_message_complete(self) -> None:
        """Close a connection that its client wants closed, but not before the whole body has arrived. Otherwise the
        connection of a client that still sends would be reset, and the client would not see an early answer."""
        super().on_message_complete()
        if self.cycle is not None and not self._keeps_alive:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > _MOST_HEAD:
            raise _TooMuch

    def _should_upgrade(self) -> bool:
        """Return whether uvicorn calls `handle_websocket_upgrade` for a header with `Upgrade`."""
        return bool(self.parser.get_method() != b"CONNECT")

    def handle_websocket_upgrade(self) -> None:
        """Ignore the client's request to change to another protocol, as HTTP allows. The parser has stopped after the
        header, because it takes the body for data of that protocol. So the parser gets the header again, without
        `Upgrade`, and then the body."""
        [end] = sys.exception().args  # type: ignore[union-attr]
        fields = b"".join(b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade")
        line = f"{self.scope['method']} {self.url.decode('latin-1')} HTTP/{self.scope['http_version']}\r\n"
        self._data = line.encode("latin-1") + fields + b"\r\n" + self._data[end:]
        super().data_received(self._data)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not valid HTTP. Close the connection after the answers to complete earlier requests."""
        last = self.cycle
        if last is not None and not last.response_complete and not last.more_body:
            last.keep_alive = False
            self.flow.read_paused = False  # otherwise uvicorn would read again when the answer ends
            self.transport.pause_reading()
            return
        if self._answering is None or self._answering.response_complete or not self._answering.response_started:
            why = f"the request is not valid HTTP, or its header is larger than {_MOST_HEAD} bytes"
            body = APIError(400, why).body()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> Any:
    """Wrap the application for an HTTP/1.0 request, whose client does not know chunked bodies. A body of unknown length
    is sent as it is, and the end of the connection marks its end."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        sized = True

        async def send_plain(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if sized else False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
