"""What the engine's process does for the HTTP server processes: engine loop, shared counters, statistics of steps."""

from __future__ import annotations

import shutil
import tempfile

import msgspec
import zmq

from megakernel.errors import MegakernelError
from megakernel.roofline import Ceilings
from megakernel.serving.bench.ceilings import share_of
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.live import Live
from megakernel.serving.server.board import ENGINE_FIELDS, Board
from megakernel.serving.server.loop import EngineLoop
from megakernel.serving.server.messages import ROOFLINE, TIMELINE, Description
from megakernel.serving.text.llm import LLM
from megakernel.timeline import page, resolve, summarise

TRACE_WAIT_S = 10.0  # seconds to wait for the engine to run a step that can be traced


class EngineHost:
    """Serves an LLM's engine to HTTP server processes or to one `AsyncLLM`. `close` ends everything except the LLM."""

    def __init__(
        self, llm: LLM, *, source: str, name: str, frontends: int, max_waiting: int, ceilings: Ceilings | None = None
    ):
        """`source` says where the tokenizer is, and `name` is the model name that the live page shows. Steps are
        recorded and compared with `ceilings`, the hardware's maximum rates. Without `ceilings` nothing is recorded."""
        engine, dims = llm.engine, llm.engine.dims
        folder = tempfile.mkdtemp(prefix="megakernel-")  # `mkdtemp` makes a folder that other users cannot enter
        self.description = Description(
            source=source,
            name=llm.model,
            vocab=llm.config.vocab,
            max_context=dims.bucket.max_context,
            hidden=llm.config.hidden,
            pooling=llm.pooling,
            kv_page=dims.bucket.kv_page,
            sampling=llm.sampling,
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
        if ceilings is not None:
            self._record_steps(llm, name, ceilings)

    def _record_steps(self, llm: LLM, name: str, ceilings: Ceilings) -> None:
        self._row.put(ceiling_flops=ceilings.flops, ceiling_bytes=ceilings.read_bytes_per_s)
        about = {"model": name, "kv_cache": f"KV in {llm.kv_cache}", "threads": f"{llm.threads} threads"}
        self.live = Live(
            ceilings,
            llm.engine.stats,
            tied=llm.config.tied,
            max_seqs=llm.engine.dims.bucket.max_seqs,
            about=llm.about | about,
        )
        self.loop.on_step.append(self._record)
        self.loop.live = self.live
        machine = share_of(ceilings, llm.machine, llm.engine.dims.split.tp)

        def timeline() -> bytes | None:
            """Trace one step, and return it as an HTML page."""
            traced = self.live.trace(TRACE_WAIT_S)
            if traced is None:
                return None
            step = resolve(*traced, machine)
            return page((step, summarise(step))).encode()

        self.loop.views = {ROOFLINE: lambda: msgspec.json.encode(self.live.snapshot()), TIMELINE: timeline}

    def start(self) -> None:
        self.loop.start()

    def close(self) -> None:
        self.loop.close()
        self._context.term()
        shutil.rmtree(self.description.folder, ignore_errors=True)

    def _record(self, step: Step, seconds: float) -> None:
        self.live.add(step, seconds, self.loop.engine.stats)
        totals = self.live.totals()
        names = ("steps", "wall_s", "bound_s", "flops", "bytes", "rows")
        self._row.put(**{name: getattr(totals, name) for name in names})
