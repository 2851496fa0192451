"""Worker threads for work that would block the event loop. Clients take turns in using them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
CLIENT: ContextVar[str] = ContextVar("client", default="")  # the client address of the current request


class ThreadTurns:
    """Runs work in `threads` threads. Waiting clients get a thread in turn, however much work each has sent. A client
    that already has a thread never gets the last free one, so its long work leaves a thread for other clients."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "turns")
        self._free = threads
        # The number of calls of each client that have a thread.
        self._running: Counter[str] = Counter()
        # The calls of each client that wait for a thread. The clients are in the order of their turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for the client's turn, run `work` in a thread, and return its result."""
        client, loop = CLIENT.get(), asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._deal()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # a thread was assigned just before the cancellation, so release it
                self._end(client)
            raise
        done = self._pool.submit(work)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                loop.call_soon_threadsafe(self._end, client)

        done.add_done_callback(ended)  # runs even if the caller was cancelled
        return await asyncio.wrap_future(done)

    def _end(self, client: str) -> None:
        self._free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._deal()

    def _deal(self) -> None:
        while self._free:
            client = next((c for c in self._waiting if self._free > 1 or c not in self._running), None)
            if client is None:
                return
            turn = self._waiting[client].popleft()
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.cancelled():
                self._free -= 1
                self._running[client] += 1
                turn.set_result(None)
