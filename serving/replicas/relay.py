"""Passes the answer of a replica (one of several equal servers) on to the client. If the replica fails, another
continues."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from megakernel.serving.replicas.server_process import Head, Part
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.writer import MARK, WAITING, Replay, event

log = logging.getLogger("ray.serve")
# A request that crashes every replica must not be tried forever. It fails after this number of attempts in a row that
# gave the client nothing new. The pauses between them, in seconds, double each time and add up to 51 s.
_MOST_ATTEMPTS, _FIRST_PAUSE = 10, 0.1
# Maximum bytes of an answer that are held back. 2,048 embeddings of 8,192 values have about 340 million bytes.
_MOST_KEPT = 1 << 29
_LOOK_SECONDS = 1.0  # seconds between checks whether any replica runs, while a request waits for an answer


class _Lost(Exception):
    """The replica cannot give the rest of its answer."""


class _NoneLeft(Exception):
    """No replica has run for the configured stall timeout."""


async def relay(
    ask: Callable[[Replay], AsyncGenerator[Part]],
    any_runs: Callable[[], Awaitable[bool]],
    stall_seconds: float,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Send the client the answer to a request. `ask` passes the request to a replica and yields the head of the answer,
    then pieces of the body. If the replica is lost, another one continues the answer. No event may be sent twice.
    So the events of a token are held back until the MARK that follows them has arrived. An answer without events is
    sent when it is complete. If no replica runs for `stall_seconds`, the client gets a 503, or an error event."""
    replay = Replay(secrets.randbits(64), int(time.time()))
    sent: Head | None = None  # status and headers that the client has got, if any
    attempts = 0
    while True:
        head, rest = Head(0, [], ""), bytearray()
        try:
            async with aclosing(_parts(ask(replay), any_runs, stall_seconds)) as parts:
                async for part in parts:
                    if isinstance(part, Head):
                        head = part
                        if sent and (head.status, head.kind) != (sent.status, sent.kind):
                            raise _Lost(f"cannot continue on a replica with other settings or status {head.status}")
                        continue
                    rest += part
                    if len(rest) > _MOST_KEPT:
                        raise _Lost(f"an event or answer of the replica has more than {_MOST_KEPT} bytes, the limit")
                    if not head.streams or b"\n" not in part:  # each event and each mark ends with line breaks
                        continue
                    *known, last = MARK.split(rest)  # events and the number of their choice, alternately
                    if last == WAITING:  # belongs to no token, so it is sent at once
                        known, last = [*known, last], b""
                    rest = bytearray(last)
                    if known and sent is None:
                        await _start(head, send)
                        sent = head
                    for choice in map(int, known[1::2]):
                        replay.given[choice] = replay.given.get(choice, 0) + 1
                        attempts = 0
                    if events := b"".join(known[::2]):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            if sent is None:
                await _start(head, send)
            break
        except _Lost as e:
            attempts += 1
            log.warning("a replica was lost: %r", e.__cause__ or e)
            if attempts == _MOST_ATTEMPTS or isinstance(e.__cause__, _NoneLeft):
                told = "the replica that computed this answer was lost: ask again"
                lost = APIError(503, told, headers={"Retry-After": "1"})
                if sent is None:
                    await lost.response()(scope, receive, send)
                    return
                rest = bytearray(event(lost.body()) + event(b"[DONE]"))
                break
            await asyncio.sleep(_FIRST_PAUSE * 2 ** (attempts - 1))
    await send({"type": "http.response.body", "body": bytes(rest), "more_body": False})


async def _parts(
    parts: AsyncGenerator[Part], any_runs: Callable[[], Awaitable[bool]], stall_seconds: float
) -> AsyncGenerator[Part]:
    """Yield the parts of an answer. Every error is raised as _Lost, because another replica can answer instead. _Lost
    is also raised if no replica begins to answer."""
    try:
        async with aclosing(parts):
            yield await _first(parts, any_runs, stall_seconds)
            async for part in parts:
                yield part
    except Exception as e:
        raise _Lost from e


async def _first(parts: AsyncGenerator[Part], any_runs: Callable[[], Awaitable[bool]], stall_seconds: float) -> Part:
    first = asyncio.ensure_future(anext(parts))
    seen = time.monotonic()
    try:
        while not first.done():
            await asyncio.wait((first,), timeout=_LOOK_SECONDS)
            now = time.monotonic()
            if first.done() or await any_runs():
                seen = now
            elif now - seen >= stall_seconds:
                raise _NoneLeft
        return first.result()
    finally:
        first.cancel()
        await asyncio.wait((first,))


async def _start(head: Head, send: Send) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
    await send({"type": "http.response.start", "status": head.status, "headers": raw})
