"""An engine in a thread of its own, asked from an asyncio event loop.

The thread takes what was submitted and aborted since the last step, runs a step, and hands all its tokens over with
one call to the event loop. Nothing that a client does, reading slowly or not at all, holds a step up: tokens wait in
their job, at most `max_tokens` of them. Text is made from ids by whoever reads the job.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter

from ..errors import MegakernelError
from .engine import Engine, Step
from .request import Request
from .sampling import SamplingParams

log = logging.getLogger(__name__)


class EngineDead(MegakernelError):
    """The engine stopped on an error of its own; no request can be answered any more."""


class Overloaded(MegakernelError):
    """Too much waits already; trying again later may work."""


@dataclass(frozen=True)
class Piece:
    """One generated token of choice `choice` of prompt `prompt`, at `at` seconds of `perf_counter`.

    `top_logprobs` are there where the parameters ask for them. `finish_reason` is the engine's: `stop` for an
    end-of-sequence or stop id, `length`, or None; stop strings are the reader's affair.
    """

    prompt: int
    choice: int
    token_id: int
    logprob: float
    top_logprobs: dict[int, float] | None
    finish_reason: str | None
    at: float


@dataclass(eq=False)
class Job:
    """Prompts that were submitted together, as the event loop sees them. `requests` are there from the first piece on.

    Only the event loop's thread may touch a job.
    """

    prompts: list[list[int]]
    params: SamplingParams
    submitted_at: float
    requests: list[Request] = field(default_factory=list)
    started_at: float | None = None  # when the engine took it
    _pieces: list[Piece] = field(default_factory=list)
    _error: Exception | None = None
    _waiter: asyncio.Future[None] | None = None
    unfinished: int = 0  # choices

    def __post_init__(self) -> None:
        self.unfinished = len(self.prompts) * self.params.n

    @property
    def done(self) -> bool:
        """Every choice has ended in the engine."""
        return self.unfinished == 0

    async def take(self) -> list[Piece]:
        """What was generated since the last call, at least one piece. Raises EngineDead."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.unfinished -= piece.finish_reason is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.unfinished = 0
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True)
class Load:
    """What the engine held after its last step. Sequences are choices."""

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages: int


class AsyncEngine:
    """Runs an engine; `submit` and `abort` belong to the event loop's thread, `start` to a coroutine of it.

    `max_waiting` bounds the choices that wait for their first step; beyond it `submit` raises Overloaded.
    """

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self.engine = engine
        # Both called in the engine's thread: with a step and the seconds since the one before it ended, or since work
        # came to an idle engine; and whether to trace the next step.
        self.on_step: list[Callable[[Step, float], None]] = []
        self.wants_trace: Callable[[], bool] = lambda: False
        self._max_waiting = max_waiting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: set[Job] = set()  # submitted and not done: the event loop's
        self._unanswered = 0  # their choices
        self._error: EngineDead | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Shared: what the loop asks of the thread, and when the thread last got anywhere.
        self._changed = threading.Condition()
        self._asked: list[Callable[[], None]] = []
        self._stopping = False
        self._progress_at = monotonic()
        # The thread's own.
        self._owners: dict[Request, tuple[Job, int]] = {}
        self._step_since = perf_counter()
        self._measure()

    # -- the event loop's side

    def start(self) -> None:
        """Begin to step. Pieces are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Abort what is left and end the thread, after the step it is in."""
        self._ask(self._stop)
        await asyncio.to_thread(self._thread.join)

    @property
    def dead(self) -> EngineDead | None:
        return self._error

    @property
    def waiting(self) -> int:
        """Choices that no step has taken in."""
        return max(0, self._unanswered - self.load.running)

    def stalled_for(self) -> float:
        """Seconds for which there was work and no step ended; 0 without work."""
        return monotonic() - self._progress_at if self._jobs else 0.0

    def check(self, prompts: Seq[Seq[int]], params: SamplingParams) -> list[list[int]]:
        """The prompts as the engine takes them. Raises MegakernelError where one can never run."""
        return [self.engine.check(prompt, replace(params, stop=())) for prompt in prompts]

    def submit(self, prompts: list[list[int]], params: SamplingParams) -> Job:
        """Queue prompts that passed `check`. Stop strings in `params` are not looked for."""
        if self._error is not None:
            raise self._error
        job = Job(prompts, replace(params, stop=()), perf_counter())
        if self.waiting + job.unfinished > self._max_waiting:
            raise Overloaded(f"{self.waiting} sequences wait already, of at most {self._max_waiting}: try again later")
        if not self._jobs:
            self._progress_at = monotonic()
        self._jobs.add(job)
        self._unanswered += job.unfinished
        self._ask(lambda: self._add(job))
        return job

    def abort(self, job: Job) -> None:
        """Stop generating for a job; nothing happens where it is done."""
        if job in self._jobs:
            self._drop(job)
            self._ask(lambda: self._abort(job))

    def fail_all(self, error: MegakernelError) -> None:
        """Abort every job; whoever reads one gets `error`."""
        for job in list(self._jobs):
            self.abort(job)
            job.fail(error)

    def _deliver(self, pieces: list[tuple[Job, Piece]]) -> None:
        for job, piece in pieces:
            if job in self._jobs:
                job.put(piece)
                self._unanswered -= piece.finish_reason is not None
                if job.done:
                    self._drop(job)

    def _drop(self, job: Job) -> None:
        self._jobs.discard(job)
        self._unanswered -= job.unfinished

    def _die(self, error: EngineDead) -> None:
        self._error = error
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
            while not self._stopping:
                with self._changed:
                    if not self._asked and self.engine.idle:
                        self._changed.wait_for(lambda: self._asked)
                        self._step_since = perf_counter()
                    asked, self._asked = self._asked, []
                for command in asked:
                    command()
                if not self.engine.idle and not self._stopping:
                    self._step(self._loop)
        except Exception as e:
            log.exception("the engine stopped")
            reason = str(e) if isinstance(e, MegakernelError) else "its log says why"
            self._loop.call_soon_threadsafe(self._die, EngineDead(f"the engine stopped, restart the server: {reason}"))

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        step = self.engine.step(trace=self.wants_trace())
        now = perf_counter()
        self._progress_at = monotonic()
        pieces: list[tuple[Job, Piece]] = []
        for token in step.tokens:
            job, prompt = self._owners[token.request]
            top = token.request.choices[token.choice].top_logprobs
            piece = Piece(
                prompt,
                token.choice,
                token.token_id,
                token.logprob,
                top[-1] if top else None,
                token.finish_reason,
                now,
            )
            pieces.append((job, piece))
        for token in step.tokens:
            if token.request.done:
                self._owners.pop(token.request, None)
        self._measure()
        if pieces:
            loop.call_soon_threadsafe(self._deliver, pieces)
        seconds, self._step_since = now - self._step_since, now
        for observer in self.on_step:
            observer(step, seconds)

    def _measure(self) -> None:
        e = self.engine
        self.load = Load(len(e._running), len(e._waiting), e._total_pages - e._pool.free, e._total_pages)

    def _add(self, job: Job) -> None:
        for index, prompt in enumerate(job.prompts):
            request = self.engine.add(prompt, job.params)
            job.requests.append(request)
            self._owners[request] = (job, index)

    def _abort(self, job: Job) -> None:
        for request in job.requests:
            if self._owners.pop(request, None):
                self.engine.abort(request)
        self._measure()

    def _stop(self) -> None:
        self._stopping = True
