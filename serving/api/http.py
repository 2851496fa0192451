"""HTTP below the routes: keys and limits before a body is parsed, clients that leave, server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import APIError, as_api_error

log = logging.getLogger(__name__)
T = TypeVar("T")
BODY_SECONDS = 60.0  # in which a body must have arrived


class ClientGone(Exception):
    """The client closed the connection; nobody reads what is sent now."""


class Gate:
    """ASGI middleware: 401 without a key, 413 for a large body, 408 for a slow one.

    `keys` guard /v1 alone. The application gets the body in one piece.
    """

    def __init__(self, app: ASGIApp, *, keys: list[str], max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            if self._keys and scope["path"].startswith("/v1"):
                self._authorise(headers.get(b"authorization", b""))
            body = await self._body(headers, receive)
        except ClientGone:
            return
        except APIError as e:
            await e.response()(scope, receive, send)
            return
        delivered = False

        async def receive_again() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            await self._app(scope, receive_again, send)
        except ClientGone:
            log.debug("a client left %s", scope["path"])

    def _authorise(self, header: bytes) -> None:
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        # Every key is compared, in time that depends on none of them.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise APIError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        too_large = APIError(
            413, f"the body is larger than {self._max_body} bytes: send less", headers={"Connection": "close"}
        )
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > self._max_body:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise APIError(
                408, f"the body did not arrive within {BODY_SECONDS:.0f} s", headers={"Connection": "close"}
            ) from None


def _digest(key: bytes) -> bytes:
    """Keys of any length become equally long."""
    return hashlib.sha256(key).digest()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, when the client closes the connection."""
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


class EventStream(Response):
    """Server-sent events: one per string of JSON, then `[DONE]`. An error that comes after the start is an event too.

    The first event is there before this is made, so that a failure until then has a status of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._rest):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        await event(self._first)
        try:
            async for data in self._rest:
                await event(data)
        except Exception as e:
            error = as_api_error(e)
            if error.status == 500:
                log.exception("a stream failed")
            await event(error.body())
        await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
