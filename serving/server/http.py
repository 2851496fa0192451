"""The HTTP layer below the routes: access checks, and limits on bodies."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from time import perf_counter

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megakernel.serving.server import client, errors, service, writer
from megakernel.serving.server.limits import BODY_SECONDS, LARGE_BODY, TURNS, AccessRules, Limits, has_more_values

log = logging.getLogger(__name__)
_MOST_ID = 256  # maximum characters of a client's X-Request-Id
_LEFT = 499  # the status in the log if the client closed the connection before the end of the answer


class Gate:
    """ASGI middleware that refuses clients without access, and bodies that are too large, too slow or too complex. It
    reads a body only for the paths in `takes_body`, after the access check, and passes it on in one message."""

    def __init__(
        self, app: ASGIApp, *, access: AccessRules, limits: Limits, max_values: int, takes_body: Collection[str]
    ) -> None:
        self._app, self._access, self._takes_body = app, access, takes_body
        self._max_body, self._max_values = limits.max_body, max_values
        self._max_bodies = max(limits.max_bodies, limits.max_body)
        self._held = 0  # bytes of all bodies in memory
        self._large = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["method"] == "HEAD":  # answered like GET; uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        scope[writer.DIRECT] = send
        service.CLIENT.set(scope["client"][0] if scope.get("client") else "")
        writer.REPLAYED.set(writer.replayed(headers.get(writer.HEADER.encode())))
        began, answers = perf_counter(), list[client.Answers]()
        service.ANSWERS.set(answers)
        send = noted = _Noted(send, headers.get(b"x-request-id", b""))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            names = [name for name, _ in scope["headers"]]
            for name in (b"host", b"authorization", b"x-api-key"):
                if names.count(name) > 1:
                    raise errors.APIError(400, f"the request has several {name.decode().title()} headers: send one")
            self._access.check(path, headers)
            if scope["method"] == "OPTIONS" and path in ("/", "*"):  # a balancer's check
                await Response(status_code=204, headers={"Allow": "GET"})(scope, receive, send)
            elif scope["method"] == "POST" and path in self._takes_body:
                await self._with_body(headers, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except errors.ClientGone:
            noted.status = _LEFT
        except errors.APIError as e:
            await e.response(scope["path"])(scope, receive, send)
        finally:
            if scope["method"] == "POST":
                noted.log(scope["path"], perf_counter() - began, answers)

    async def _with_body(self, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and call the application. Until the request is answered, its body counts against the limit on
        the total bytes of all bodies in memory."""
        coding = headers.get(b"content-encoding", b"").decode("latin-1")
        if coding.lower() not in ("", "identity"):
            told = f"the body is compressed ({errors.quoted(coding)}): send it without Content-Encoding"
            raise errors.APIError(415, told, headers={"Accept-Encoding": "identity"})
        body = await self._read(headers, receive)
        size = len(body)
        try:
            if size > LARGE_BODY:
                async with self._large:  # parse large bodies one at a time
                    for _ in range(TURNS):
                        await asyncio.sleep(0)
            if has_more_values(body, self._max_values):
                raise errors.APIError(413, f"the body has more than {self._max_values} JSON values: send less")
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            del body

            async def receive_again() -> Message:
                return messages.pop() if messages else await receive()

            await self._app(scope, receive_again, send)
        finally:
            self._held -= size

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body, and add its size to `_held`, the bytes of all bodies in memory."""
        declared = headers.get(b"content-length", b"0")
        body = bytearray()
        try:
            self._admit(int(declared) if declared.isdigit() else 0, 0)
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise errors.ClientGone
                    piece = message.get("body", b"")
                    self._admit(len(body) + len(piece), len(piece))
                    body += piece
                    self._held += len(piece)
                    if not message.get("more_body", False):
                        return bytes(body)
        except BaseException as e:
            self._held -= len(body)
            if isinstance(e, TimeoutError):
                late = f"the body did not arrive within {BODY_SECONDS:.0f} s"
                raise errors.APIError(408, late, headers={"Connection": "close"}) from None
            raise

    def _admit(self, size: int, more: int) -> None:
        """Raise a 413 if a body of `size` bytes is too large. Raise a 503 if `more` further bytes would take the bodies
        of all requests together beyond their limit."""
        if size > self._max_body:
            raise errors.APIError(413, f"the body is larger than {self._max_body} bytes: send less")
        if self._held + more > self._max_bodies:
            told = f"the bodies of all requests together would be larger than {self._max_bodies} bytes: try again later"
            raise errors.APIError(503, told, headers={"Retry-After": "5"})


class _Noted:
    """Sends an answer with the header X-Request-Id (the client's own value, or a new one), and logs its end."""

    def __init__(self, send: Send, given: bytes) -> None:
        self._send, self.status = send, 500
        self._id = given if 0 < len(given) <= _MOST_ID and given.isascii() else secrets.token_hex(16).encode()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._id)]
        await self._send(message)

    def log(self, path: str, seconds: float, answers: list[client.Answers]) -> None:
        read, made = (sum(getattr(a, name) for a in answers) for name in ("prompt_tokens", "completion_tokens"))
        begun = (one.first_at - a.submitted_at for a in answers for one in a.transcripts if one.first_at)
        first = min(begun, default=seconds)
        told = "%s POST %.200r: status %d, %d prompt tokens, %d generated, first after %.3f s, %.3f s in all"
        log.info(told, self._id.decode(), path, self.status, read, made, first, seconds)
