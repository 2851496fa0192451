"""Answers frontends that ask how an engine's steps ran, in a thread of its own, because an answer may take seconds."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import zmq
import zmq.asyncio

from megakernel.machine import Machine
from megakernel.serving.engine.live import Live
from megakernel.serving.server.messages import ROOFLINE, TIMELINE, Look, Seen, decode_look, encode
from megakernel.timeline import page, resolve, summarise

TRACE_WAIT_S = 10.0  # maximum time to wait for a step to trace


class Looks:
    """A thread that answers queries about the steps in the record `live`. It handles several queries at a time.

    Frontends send their queries to the ZeroMQ address `address`.
    """

    def __init__(self, live: Live, machine: Machine, address: str) -> None:
        self._live, self._machine, self._address = live, machine, address
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] | None = None
        self._tracing: asyncio.Future[bytes | None] | None = None
        self._thread = threading.Thread(target=self._run, name="looks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Queries that still wait get no answer."""
        self._loop.call_soon_threadsafe(lambda: self._serving and self._serving.cancel())
        self._thread.join()

    def _run(self) -> None:
        self._serving = self._loop.create_task(self._serve())
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(_until_cancelled(self._serving))

    async def _serve(self) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(self._address)
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                frontend, data = await socket.recv_multipart()
                task = asyncio.ensure_future(self._answer(socket, frontend, decode_look(data)))
                answers.add(task)
                task.add_done_callback(answers.discard)
        finally:
            for task in answers:
                task.cancel()
            context.destroy(linger=0)

    async def _answer(self, socket: zmq.asyncio.Socket, frontend: bytes, look: Look) -> None:
        content = await {ROOFLINE: self._roofline, TIMELINE: self._timeline}[look.what]()
        await socket.send_multipart([frontend, encode(Seen(look.number, content))])

    async def _roofline(self) -> bytes:
        return await asyncio.to_thread(lambda: msgspec.json.encode(self._live.snapshot()))

    async def _timeline(self) -> bytes | None:
        """Trace one step, and return it as an HTML page. Concurrent queries share one trace and one worker thread."""
        if self._tracing is None or self._tracing.done():
            self._tracing = asyncio.ensure_future(asyncio.to_thread(self._trace))
        return await asyncio.shield(self._tracing)

    def _trace(self) -> bytes | None:
        traced = self._live.trace(TRACE_WAIT_S)
        if traced is None:
            return None
        step = resolve(*traced, self._machine)
        return page((step, summarise(step))).encode()


async def _until_cancelled(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
