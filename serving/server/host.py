"""What the engine's process runs for its frontends: engine loop, shared counters, and the record of steps."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading

import msgspec
import zmq
import zmq.asyncio

from megakernel.errors import MegakernelError
from megakernel.machine import Machine
from megakernel.roofline import Ceilings
from megakernel.serving.bench.ceilings import share_of
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.live import Live
from megakernel.serving.server.board import ENGINE_FIELDS, Board
from megakernel.serving.server.loop import EngineLoop
from megakernel.serving.server.messages import ROOFLINE, TIMELINE, Description, Look, Seen, decode_look, encode
from megakernel.serving.text.llm import LLM
from megakernel.timeline import page, resolve, summarise

TRACE_WAIT_S = 10.0  # maximum time to wait for a step to trace


class EngineHost:
    """Serves an LLM's engine to `frontends` frontends.

    The frontends are either HTTP server processes or one `AsyncLLM`. `close` ends everything except the LLM.
    """

    def __init__(
        self, llm: LLM, *, source: str, name: str, frontends: int, max_waiting: int, ceilings: Ceilings | None = None
    ):
        """`source` says where the tokenizer is, and `name` is the model name that the live page shows.

        Steps are recorded and compared with `ceilings`. Without `ceilings` nothing is recorded.
        """
        engine, dims = llm.engine, llm.engine.dims
        folder = tempfile.mkdtemp(prefix="megakernel-")  # only this user may enter the folder
        self.description = Description(
            source=source,
            name=llm.model,
            vocab=llm.config.vocab,
            max_context=dims.max_context,
            kv_page=dims.kv_page,
            folder=folder,
            rows=1 + frontends,
        )
        self._row = Board(self.description.board, 1 + frontends, create=True).row(0, ENGINE_FIELDS)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.loop = EngineLoop(
                engine,
                self._context,
                self.description.requests,
                self._row,
                max_waiting=max_waiting,
                grammars=llm.grammars,
            )
        except zmq.ZMQError as e:
            raise MegakernelError(f"cannot create a socket in {folder}: {e}: set TMPDIR to another folder") from e
        self._looks: Looks | None = None
        if ceilings is not None:
            self._record_steps(llm, name, ceilings)

    def _record_steps(self, llm: LLM, name: str, ceilings: Ceilings) -> None:
        self._row.put(ceiling_flops=ceilings.flops, ceiling_bytes=ceilings.read_bytes_per_s)
        about = {"model": name, "kv_cache": f"KV in {llm.kv_cache}", "threads": f"{llm.threads} threads"}
        self.live = Live(
            ceilings,
            llm.engine.stats,
            tied=llm.config.tied,
            max_seqs=llm.engine.dims.max_seqs,
            about=llm.about | about,
        )
        self.loop.on_step.append(self._record)
        self.loop.wants_trace = lambda: self.live.tracing
        self._looks = Looks(self.live, share_of(ceilings, llm.machine, llm.engine.dims.tp), self.description.looks)

    def start(self) -> None:
        if self._looks:
            self._looks.start()
        self.loop.start()

    def close(self) -> None:
        self.loop.close()
        if self._looks:
            self._looks.close()
        self._context.term()
        shutil.rmtree(self.description.folder, ignore_errors=True)

    def _record(self, step: Step, seconds: float) -> None:
        self.live.add(step, seconds, self.loop.engine.stats)
        totals = self.live.totals()
        names = ("steps", "wall_s", "bound_s", "flops", "bytes", "rows")
        self._row.put(**{name: getattr(totals, name) for name in names})


class Looks:
    """A thread that answers frontends' queries about the steps in the record `live`, several at a time.

    It is a thread of its own because an answer may take seconds.

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
