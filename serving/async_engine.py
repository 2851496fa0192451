"""An engine in a thread of its own, asked from an asyncio event loop.

The thread takes what was submitted and aborted since the last step, runs a step, and hands all its tokens over with
one call to the event loop. Nothing that a client does, reading slowly or not at all, holds a step up: tokens wait in
their job, at most `max_tokens` of them per choice. Text is made of ids by whoever reads the job.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import NamedTuple

from ..errors import MegakernelError
from .engine import Engine, Step, Token
from .request import Request
from .sampling import SamplingParams

log = logging.getLogger(__name__)


class EngineDead(MegakernelError):
    """The engine stopped on an error of its own; no request can be answered any more."""


class Overloaded(MegakernelError):
    """Too much waits already; trying again later may work."""


class Piece(NamedTuple):
    """A token of a job's prompt `prompt`; `at` is when its step ended, in seconds of `perf_counter`."""

    prompt: int
    token: Token
    at: float


@dataclass(eq=False)
class Job:
    """Prompts that were submitted together, for the event loop's thread alone.

    `open` has the (prompt, choice) that have not ended. A prompt's entry of `requests` is there from its first piece.
    """

    prompts: Seq[Seq[int]]
    params: SamplingParams
    submitted_at: float
    open: set[tuple[int, int]]
    requests: list[Request] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    _error: Exception | None = None
    _waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Piece]:
        """What was generated since the last call, at least one piece; there must be more to come.

        Raises what the job failed with.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Runs `engine`. Everything but `on_step` is for the thread of the event loop that `start` is called on.

    `max_waiting` bounds the choices that wait for their first step; beyond it `submit` raises Overloaded. `on_step` is
    called after each step, in the engine's thread, with the step and the seconds since the one before, or since work
    came.
    """

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self.engine = engine
        self.stats = engine.stats  # after the last step
        self.dead: EngineDead | None = None
        self.on_step: list[Callable[[Step, float], None]] = []
        self.wants_trace: Callable[[], bool] = lambda: False  # asked in the engine's thread before a step
        self._max_waiting = max_waiting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: set[Job] = set()  # those with something open
        self._open = 0  # choices of theirs
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stop_compiling = threading.Event()
        self._compiler = threading.Thread(
            target=engine.programs.warm, args=(self._stop_compiling,), name="compile", daemon=True
        )
        # Shared: what the event loop asks of the thread, and when the thread last got anywhere.
        self._changed = threading.Condition()
        self._asked: list[Callable[[], None]] = []
        self._closing = False
        self._progress_at = monotonic()
        # The thread's own.
        self._owners: dict[Request, tuple[Job, int]] = {}
        self._step_began = 0.0

    # -- the event loop's side

    def start(self) -> None:
        """Begin to step; pieces are delivered on the running event loop. Programs are compiled ahead of need."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._compiler.start()

    async def close(self) -> None:
        """Abort what is left and end the threads, after the step and the program that they are at."""
        self.fail_all(Overloaded("the server has stopped"))
        self._stop_compiling.set()
        self._ask(self._close)
        for thread in (self._thread, self._compiler):
            await asyncio.to_thread(thread.join)

    @property
    def waiting(self) -> int:
        """Choices that take part in no step yet."""
        return max(0, self._open - self.stats.running)

    def stalled_for(self) -> float:
        """Seconds for which there was work and no step ended; 0 without work."""
        return monotonic() - self._progress_at if self._jobs else 0.0

    def submit(self, prompts: Seq[Seq[int]], params: SamplingParams) -> Job:
        """Queue prompts that `LLM.check` accepts.

        Raises Overloaded, EngineDead, or MegakernelError where they are more than may ever wait; then none is queued.
        """
        if self.dead is not None:
            raise self.dead
        if len(prompts) * params.n > self._max_waiting:
            raise MegakernelError(
                f"{len(prompts)} prompts with n={params.n} are more than the {self._max_waiting} that may wait"
            )
        job_open = {(prompt, choice) for prompt in range(len(prompts)) for choice in range(params.n)}
        if self.waiting + len(job_open) > self._max_waiting:
            raise Overloaded(f"{self.waiting} sequences wait already, of at most {self._max_waiting}: try again later")
        job = Job(prompts, params, perf_counter(), job_open)
        if not self._jobs:
            self._progress_at = monotonic()
        self._jobs.add(job)
        self._open += len(job_open)
        self._ask(lambda: self._add(job))
        return job

    def stop(self, job: Job, prompt: int, choice: int) -> None:
        """End one choice where its reader found a stop string."""
        if (prompt, choice) in job.open:
            self._ended(job, prompt, choice)
            self._ask(lambda: self._stop(job, prompt, choice))

    def abort(self, job: Job) -> None:
        """Generate no more for a job; nothing happens where it has ended."""
        if job.open:
            self._drop(job)
            self._ask(lambda: self._abort(job))

    def fail_all(self, error: MegakernelError) -> None:
        """Abort every job; whoever reads one gets `error`."""
        for job in list(self._jobs):
            self.abort(job)
            job.fail(error)

    def _deliver(self, pieces: list[tuple[Job, Piece]]) -> None:
        for job, piece in pieces:
            token = piece.token
            if (piece.prompt, token.choice) in job.open:
                job.put(piece)
                if token.finish_reason is not None:
                    self._ended(job, piece.prompt, token.choice)

    def _ended(self, job: Job, prompt: int, choice: int) -> None:
        job.open.remove((prompt, choice))
        self._open -= 1
        if not job.open:
            self._jobs.remove(job)

    def _drop(self, job: Job) -> None:
        self._jobs.remove(job)
        self._open -= len(job.open)
        job.open.clear()

    def _die(self, error: EngineDead) -> None:
        self.dead = error
        for job in list(self._jobs):
            self._drop(job)
            job.fail(error)

    def _ask(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._asked.append(command)
            self._changed.notify()

    # -- the thread's side

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while not self._closing:
                with self._changed:
                    while not self._asked and self.engine.idle:
                        self._step_began = 0.0
                        self._changed.wait()
                    asked, self._asked = self._asked, []
                for command in asked:
                    command()
                if self.engine.idle:
                    self.stats = self.engine.stats
                else:
                    self._step(self._loop)
        except Exception as e:
            log.exception("the engine stopped")
            reason = str(e) if isinstance(e, MegakernelError) else "its log says why"
            self._loop.call_soon_threadsafe(self._die, EngineDead(f"the engine stopped, restart the server: {reason}"))

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        began = self._step_began or perf_counter()
        step = self.engine.step(trace=self.wants_trace())
        now = self._step_began = perf_counter()
        self._progress_at = monotonic()
        self.stats = self.engine.stats
        pieces: list[tuple[Job, Piece]] = []
        for token in step.tokens:
            job, prompt = self._owners[token.request]
            pieces.append((job, Piece(prompt, token, now)))
        if pieces:
            loop.call_soon_threadsafe(self._deliver, pieces)
        for token in step.tokens:
            self._forget(token.request)
        for observer in list(self.on_step):
            try:
                observer(step, now - began)
            except Exception:
                log.exception("an observer of steps failed; it is not called again")
                self.on_step.remove(observer)

    def _forget(self, request: Request) -> None:
        if request.done:
            self._owners.pop(request, None)

    def _add(self, job: Job) -> None:
        for index, prompt in enumerate(job.prompts):
            request = self.engine.add(prompt, job.params)
            job.requests.append(request)
            self._owners[request] = (job, index)

    def _stop(self, job: Job, prompt: int, choice: int) -> None:
        self.engine.stop(job.requests[prompt], choice)
        self._forget(job.requests[prompt])

    def _abort(self, job: Job) -> None:
        for request in job.requests:
            self.engine.abort(request)
            self._owners.pop(request, None)

    def _close(self) -> None:
        self._closing = True
