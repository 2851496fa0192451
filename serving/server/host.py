"""What the engine's process does for the HTTP server processes: engine loop, shared counters, statistics of steps."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref

import zmq

from megakernel.errors import MegakernelError
from megakernel.program import Program
from megakernel.roofline import Ceilings
from megakernel.serving.bench.ceilings import share_of
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.live import Totals
from megakernel.serving.server.loop import EngineLoop
from megakernel.serving.server.messages import Description
from megakernel.serving.text.llm import LLM
from megakernel.timeline import page, resolve, summarise
from megakernel.trace import Trace

TRACE_WAIT_S = 10.0  # seconds to wait for the engine to run a step that can be traced
_TOTALS = ("steps", "wall_s", "bound_s", "flops", "bytes", "rows")  # sums over all steps; `/metrics` shows the sums


class EngineHost:
    """Serves an LLM's engine to HTTP server processes or to one `AsyncLLM`. `close` ends everything except the LLM."""

    def __init__(
        self, llm: LLM, *, source: str, frontends: int, max_waiting: int, ceilings: Ceilings | None = None
    ) -> None:
        """`source` says where the tokenizer is. Steps are added up and compared with `ceilings`, the hardware's maximum
        rates. Without `ceilings`, no step is added up or traced."""
        dims = llm.engine.dims
        folder = tempfile.mkdtemp(prefix="megakernel-")  # `mkdtemp` makes a folder that other users cannot enter
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
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
        try:
            self.loop = EngineLoop(llm.engine, llm.grammars, self.description, max_waiting=max_waiting)
        except zmq.ZMQError as e:
            raise MegakernelError(f"cannot create a socket in {folder}: {e}: set TMPDIR to another folder") from e
        if ceilings is not None:
            self._record_steps(llm, ceilings)

    def _record_steps(self, llm: LLM, ceilings: Ceilings) -> None:
        self.loop.row.put(ceiling_flops=ceilings.flops, ceiling_bytes=ceilings.read_bytes_per_s)
        machine = share_of(ceilings, llm.machine, llm.engine.dims.split.tp)
        totals = Totals(ceilings, llm.config.tied)
        made = threading.Event()
        traced: tuple[Program, Trace] | None = None

        def record(step: Step, seconds: float) -> None:
            nonlocal traced
            totals.add(step, seconds)
            self.loop.row.put(**{name: getattr(totals, name) for name in _TOTALS})
            if step.output.trace is not None:
                self.loop.tracing = False
                traced = step.program, step.output.trace
                made.set()

        def timeline() -> bytes | None:
            """Trace the next step, and return its HTML page. If no step ends in time, return the last traced one."""
            made.clear()
            self.loop.tracing = True
            made.wait(TRACE_WAIT_S)
            self.loop.tracing = False
            if traced is None:
                return None
            shown = resolve(*traced, machine)
            return page((shown, summarise(shown))).encode()

        self.loop.on_step.append(record)
        self.loop.timeline = timeline

    def start(self) -> None:
        self.loop.start()

    def close(self) -> None:
        self.loop.close()
        self._remove()
