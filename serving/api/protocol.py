"""uvicorn's HTTP/1.1 protocol, with errors in the server's shape and a limit on how long a head may take."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import APIError


class Protocol(H11Protocol):
    """A connection is closed when a head is not there `timeout_keep_alive` seconds after the last answer, or at all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # uvicorn's would end the wait with the first byte.
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        # A refused request is answered before its body has come, which is then dropped as it comes.
        answered = self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE
        if answered and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = waiting
        else:
            waiting.cancel()

    def send_400_response(self, msg: str) -> None:
        body = APIError(400, "this is no HTTP request, or its head is too large").body()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
