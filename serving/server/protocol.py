"""uvicorn's HTTP/1.1 protocol with JSON errors, and with limits on the size and the arrival time of a request's header.

The header is the request line and all header fields.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megakernel.serving.server.errors import APIError

_MOST_HEAD = 1 << 16  # maximum bytes of a header

# Each header field counts as _FIELD bytes more than it has, because short fields take as long to parse as long ones.
# HTTP/2 adds the same number.
_FIELD = 32


class _HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """The HTTP/1.1 protocol of one connection. It closes the connection if no complete header arrives within
    `timeout_keep_alive` seconds.

    The time counts from the end of the last answer, or from the beginning of a new connection.
    """

    _head = 0  # bytes of the current header so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # Hide the timer from uvicorn's own method, which would cancel it at the first byte of a header.
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        # If no answer is pending, either the header is still incomplete, or the data is the rest of a refused body. In
        # both cases, the timer continues.
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
        super().on_headers_complete()
        self._head = 0

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > _MOST_HEAD:
            raise _HeadTooLarge

    def send_400_response(self, msg: str) -> None:
        body = APIError(400, f"the request is not valid HTTP, or its header is larger than {_MOST_HEAD} bytes").body()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
