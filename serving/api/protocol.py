"""uvicorn's HTTP/1.1 protocol, with errors in the server's shape and limits on how large and how late a head may be."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import APIError

_MOST_HEAD = 1 << 16  # bytes
_FIELD = 32  # bytes that a header counts beside its own, as in HTTP/2: short ones take as long as others


class _HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """A connection is closed when a head is not there `timeout_keep_alive` seconds after the last answer, or at all."""

    _head = 0  # bytes of a head so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # uvicorn's would end the wait with the first byte.
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        # Nothing waits for an answer: a head is still to come, or the rest of a body that was refused.
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
        body = APIError(400, "this is no HTTP request, or its head is too large").body()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
