"""Serves clients in turn: a queue, and worker threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")
CLIENT: ContextVar[str] = ContextVar("client", default="")  # the client address of the current request


class Turns(Generic[T]):
    """A queue of entries of several clients. The clients are served in turn, however many entries each has."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # client -> its entries, in the order of turns

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, entry: T) -> None:
        self._waiting.setdefault(client, deque()).append(entry)

    def take(self, allowed: Callable[[str], bool] = lambda client: True) -> tuple[str, T] | None:
        """Remove the next entry of a client that is `allowed`. Returns the client and the entry, or None."""
        if (client := next(filter(allowed, self._waiting), None)) is None:
            return None
        entry = self._waiting[client].popleft()
        if self._waiting[client]:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        return client, entry


class ThreadTurns:
    """Runs work in `threads` threads. Waiting clients get a thread in turn, however much work each has sent. A client
    that already has a thread never gets the last free one, so its long work leaves a thread for other clients."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "turns")
        self._free = threads
        # How many threads each client has now.
        self._running: Counter[str] = Counter()
        self._waiting: Turns[asyncio.Future[None]] = Turns()  # calls of `run` that wait for a thread

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for the client's turn, run `work` in a thread, and return its result."""
        client, loop = CLIENT.get(), asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.put(client, turn)
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
            taken = self._waiting.take(lambda client: self._free > 1 or client not in self._running)
            if taken is None:
                return
            client, turn = taken
            if not turn.cancelled():
                self._free -= 1
                self._running[client] += 1
                turn.set_result(None)
