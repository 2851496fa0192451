"""Runs an engine in its own thread and takes requests from frontends, the HTTP server processes, over ZeroMQ. Adds up
what its steps do, and traces steps for timelines.

The thread takes the messages that came since the last step, runs a step, and sends each frontend its tokens in one
message. Sending never blocks. If a frontend reads slowly, its tokens are kept in memory. Their number is bounded,
because `max_tokens` limits the tokens of each answer, and the number of waiting answers is limited too."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.model.limited import HelperLost
from megakernel.program import Program
from megakernel.roofline import Ceilings
from megakernel.serving.bench.ceilings import share_of
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.grammars import Constraint
from megakernel.serving.engine.live import Totals
from megakernel.serving.engine.request import Request, Sequence
from megakernel.serving.engine.sampling import Score, Tokens
from megakernel.serving.server import messages
from megakernel.serving.server.board import ENGINE_FIELDS, Board
from megakernel.serving.server.client import Overloaded
from megakernel.serving.server.messages import Description
from megakernel.serving.text.llm import LLM
from megakernel.timeline import page, resolve, summarise
from megakernel.trace import Trace

log = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL = b"server"  # sender name of the empty messages by which `_in_engine` wakes the engine's thread
_GRAMMARS, _TIMELINE = "grammars", "timeline"  # the kinds of slow work
TRACE_WAIT_S = 10.0  # seconds to wait for the engine to run a step that can be traced
_TOTALS = ("steps", "wall_s", "bound_s", "flops", "bytes", "rows")  # sums over all steps; `/metrics` shows the sums
_SCORES = 2048  # maximum tokens in a message of prompt log-probabilities, which a frontend decodes in a few ms
_Key = tuple[bytes, int]  # identifies a job: the frontend that sent it, and the frontend's number for its first choice


@dataclass(eq=False)
class _Job:
    """A job: the requests of one `Submit` message. `open` counts its choices (completions) that have not ended."""

    key: _Key
    client: str
    open: int
    requests: list[Request] = field(default_factory=list)


class EngineLoop:
    """Runs an LLM's engine in a thread, for HTTP server processes or for one `AsyncLLM`. No other code may call the
    engine between `start` and the end of `close`.

    Frontends (HTTP server processes) know from `description` where the engine's socket is. At most `max_waiting`
    choices of one client may wait. Of all clients together, twice as many may wait, so that no client alone fills the
    queue. Further requests are refused.
    The callbacks in `on_step` run in the engine's thread after each step. They get the step and its wall time in
    seconds, which begins when the previous step ended or, after a pause, when the step began. `on_death` runs in that
    thread when the engine has failed."""

    def __init__(
        self, llm: LLM, *, source: str, frontends: int, max_waiting: int, ceilings: Ceilings | None = None
    ) -> None:
        """`source` says where the tokenizer is. Steps are added up and compared with `ceilings`, the hardware's maximum
        rates. Without `ceilings`, no step is added up or traced."""
        self.engine, dims = llm.engine, llm.engine.dims
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
        self.row = Board(self.description.board, self.description.rows, create=True).row(0, ENGINE_FIELDS)
        self.on_step: list[Callable[[Step, float], None]] = []
        self.tracing = False  # whether to trace the next step
        self.on_death: Callable[[], None] = lambda: None
        self.timeline: Callable[[], bytes | None] = lambda: None  # traces a step and returns it as an HTML page
        self._max_waiting = max_waiting
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        try:
            self._socket.bind(self.description.requests)
        except zmq.ZMQError as e:
            raise MegakernelError(f"cannot create a socket in {folder}: {e}: set TMPDIR to another folder") from e
        self._control = self._context.socket(zmq.DEALER)
        self._control.set(zmq.IDENTITY, CONTROL)
        self._control.connect(self.description.requests)
        self._control_lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # calls for the engine's thread
        # Slow work runs in two threads, so that it delays no step: one compiles grammars, one makes timelines.
        self._threads = {kind: ThreadPoolExecutor(1, kind) for kind in (_GRAMMARS, _TIMELINE)}
        self._grammars = llm.grammars
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stop_compiling = threading.Event()
        self._compiler = threading.Thread(
            target=llm.engine.programs.warm, args=(self._stop_compiling,), name="compile", daemon=True
        )
        # Only the engine's thread uses the following fields.
        self._jobs: dict[_Key, _Job] = {}
        self._job_of: dict[Request, _Job] = {}
        self._open_of: Counter[str] = Counter()  # number of unfinished choices, by client
        self._compiling: dict[_Key, messages.Submit] = {}  # jobs that wait until their grammar is compiled
        self._uncompiled: OrderedDict[str, list[_Key]] = OrderedDict()  # by client: the jobs whose grammar waits
        self._compiles = False
        self._looking: list[bytes] = []  # frontends whose queries for a timeline wait
        self._frontends: list[bytes] = []  # those that have sent a message; `Request.reader` is an index of this list
        self._gone: set[bytes] = set()
        self._closing = False
        self._step_began = 0.0
        self._tell()
        if ceilings is not None:
            self._record_steps(llm, ceilings)

    def _record_steps(self, llm: LLM, ceilings: Ceilings) -> None:
        self.row.put(ceiling_flops=ceilings.flops, ceiling_bytes=ceilings.read_bytes_per_s)
        machine = share_of(ceilings, llm.machine, llm.engine.dims.split.tp)
        totals = Totals(ceilings, llm.config.tied)
        made = threading.Event()
        traced: tuple[Program, Trace] | None = None

        def record(step: Step, seconds: float) -> None:
            nonlocal traced
            totals.add(step, seconds)
            self.row.put(**{name: getattr(totals, name) for name in _TOTALS})
            if step.output.trace is not None:
                self.tracing = False
                traced = step.program, step.output.trace
                made.set()

        def timeline() -> bytes | None:
            """Trace the next step, and return its HTML page. If no step ends in time, return the last traced one."""
            made.clear()
            self.tracing = True
            made.wait(TRACE_WAIT_S)
            self.tracing = False
            if traced is None:
                return None
            shown = resolve(*traced, machine)
            return page((shown, summarise(shown))).encode()

        self.on_step.append(record)
        self.timeline = timeline

    def start(self) -> None:
        """Start the threads: one runs steps, one compiles programs before they are needed."""
        self._thread.start()
        self._compiler.start()

    def forget(self, frontend: bytes) -> None:
        """Abort all jobs of a frontend that has exited."""
        self._in_engine(partial(self._forget, frontend))

    def close(self) -> None:
        """Let the threads finish the current step and compilation, end them, and abort the remaining requests."""
        self._stop_compiling.set()
        self._in_engine(self._end)
        self._thread.join()
        self._compiler.join()
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
        self._control.close(linger=0)
        self._socket.close(linger=1000)
        self._context.term()
        self._remove()

    def _in_engine(self, call: Callable[[], None]) -> None:
        """Let the engine's thread make a call between two steps."""
        self._calls.put(call)
        with self._control_lock:
            self._control.send(b"")

    # -- the thread

    def _end(self) -> None:
        self._closing = True

    def _forget(self, frontend: bytes) -> None:
        self._gone.add(frontend)
        for job in [job for job in (*self._jobs, *self._compiling) if job[0] == frontend]:
            self._abort(*job)

    def _run(self) -> None:
        try:
            while not self._closing:
                for frontend, message in self._received():
                    self._handle(frontend, message)
                if self._jobs:
                    self._step()
                self._tell()
            for request in self._job_of:
                self.engine.abort(request)
        except Exception as e:
            log.exception("the engine stopped")
            reason = str(e) if isinstance(e, MegakernelError) else "the server's log has the reason"
            self._die(f"the engine has stopped, restart the server: {reason}")

    def _die(self, why: str) -> None:
        """Tell every frontend that the engine is dead, and answer later messages in the same way until `close`."""
        for frontend in self._frontends:  # ZeroMQ drops what is sent to those that are gone
            self._socket.send_multipart([frontend, messages.encode(messages.Dead(why))])
        self.on_death()
        while not self._closing:
            frontend, _ = self._socket.recv_multipart()
            if frontend == CONTROL and self._calls.get() == self._end:
                return
            self._socket.send_multipart([frontend, messages.encode(messages.Dead(why))])

    def _received(self) -> Iterator[tuple[bytes, messages.ToEngine]]:
        """Yield the messages that have arrived. If no job runs or waits, first wait until a message arrives."""
        if not self._jobs:
            self._step_began = 0.0
            self._socket.poll()
        while True:
            try:
                frontend, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frontend == CONTROL:
                self._calls.get()()
            elif frontend not in self._gone:
                yield frontend, messages.decode_to_engine(data)

    def _handle(self, frontend: bytes, message: messages.ToEngine) -> None:
        if frontend not in self._frontends:
            self._frontends.append(frontend)
        match message:
            case messages.Submit():
                self._submit(frontend, message)
            case messages.Stop():
                self._stop(frontend, message)
            case messages.Abort(first):
                self._abort(frontend, first)
            case messages.Look():
                self._look(frontend)

    def _submit(self, frontend: bytes, asked: messages.Submit) -> None:
        """Queue a job now, or when its grammar is compiled."""
        key, params = (frontend, asked.first), asked.params
        with self._refusing(key):
            constraint = self._grammars.known(params) if params.constrained else None
            if constraint or not params.constrained:
                self._queue(key, asked, constraint)
            else:
                self._check_room(asked)
                self._compiling[key] = asked
                self._uncompiled.setdefault(asked.client, []).append(key)
                self._compile_next()

    def _compile_next(self) -> None:
        """Compile one grammar of the client whose turn it is, unless another grammar is being compiled."""
        while not self._compiles and self._uncompiled:
            client, keys = self._uncompiled.popitem(last=False)
            key = keys.pop(0)
            if keys:
                self._uncompiled[client] = keys  # behind all other clients
            if asked := self._compiling.get(key):  # otherwise it was aborted
                self._compiles = True
                work, then = partial(self._grammars.get, asked.params), partial(self._take_compiled, key)
                self._run_beside(_GRAMMARS, work, then)

    def _take_compiled(self, key: _Key, result: Constraint | MegakernelError | None) -> None:
        self._compiles = False
        self._compile_next()
        asked = self._compiling.pop(key, None)
        if asked is None:
            return  # aborted
        with self._refusing(key):
            if isinstance(result, MegakernelError):
                raise result
            self._queue(key, asked, result)

    def _look(self, frontend: bytes) -> None:
        """Answer a query for the page of a traced step. Queries that come meanwhile share the answer."""
        self._looking.append(frontend)
        if len(self._looking) == 1:
            self._run_beside(_TIMELINE, self.timeline, self._show)

    def _show(self, content: bytes | MegakernelError | None) -> None:
        seen = content if isinstance(content, bytes) else None
        for frontend in self._looking:
            self._socket.send_multipart([frontend, messages.encode(messages.Seen(seen))])
        self._looking.clear()

    def _run_beside(self, kind: str, work: Callable[[], T], then: Callable[[T | MegakernelError], None]) -> None:
        """Run `work` in the thread for its kind, so that no step has to wait. Afterwards, call `then` in the engine's
        thread with the result or the error."""

        def run() -> None:
            result: T | MegakernelError
            try:
                result = work()
            except MegakernelError as e:
                result = e
            except Exception:
                log.exception("%s: work beside the engine failed", kind)
                result = MegakernelError("internal error, see the server's log")
            self._in_engine(partial(then, result))

        self._threads[kind].submit(run)

    @contextmanager
    def _refusing(self, key: _Key) -> Iterator[None]:
        """Tell the frontend that its job is refused if the `with` block raises MegakernelError."""
        try:
            yield
        except MegakernelError as e:
            refusal = messages.Refused(key[1], str(e), isinstance(e, (Overloaded, HelperLost)))
            self._socket.send_multipart([key[0], messages.encode(refusal)])

    def _check_room(self, asked: messages.Submit) -> None:
        """Raise MegakernelError if a job has more choices than may ever wait. Raise Overloaded if too many wait now."""
        n, count, most = asked.params.n, len(asked.prompts) * asked.params.n, self._max_waiting
        if count > most:
            raise MegakernelError(
                f"{len(asked.prompts)} prompts with n={n} exceed the limit of {most} waiting sequences: ask for fewer"
            )
        waiting = self._waiting()
        own = min(waiting, self._open_of[asked.client])  # an upper bound: some of these choices may be running
        for already, allowed in ((own, most), (waiting, 2 * most)):
            if already + count > allowed:
                told = f"{already} sequences are waiting already and at most {allowed} may wait: try again later"
                raise Overloaded(told)

    def _queue(self, key: _Key, asked: messages.Submit, constraint: Constraint | None) -> None:
        """Queue all prompts of a job for the engine. Raises MegakernelError if the job must be refused."""
        frontend, first = key
        self._check_room(asked)
        prompts, n = [np.frombuffer(ids, np.int32) for ids in asked.prompts], asked.params.n
        # Check all prompts before the first one is queued, so that a job is refused as a whole.
        for prompt in prompts if len(prompts) > 1 else ():
            self.engine.check(prompt, asked.params)
        job = _Job(key, asked.client, len(prompts) * n)
        params = asked.params
        for number, prompt in enumerate(prompts):
            if asked.seed is not None and asked.params.seed is None:
                params = replace(params, seed=(asked.seed + number) % 2**64)
            request = self.engine.add(
                prompt,
                params,
                first=first + number * n,
                reader=self._frontends.index(frontend),
                client=asked.client,
                constraint=constraint,
            )
            job.requests.append(request)
        if not self._jobs:
            self.row.put(progress_at=monotonic(), open=job.open)  # now, because the first step may never end
        self._jobs[key] = job
        accepted = messages.Accepted(first, constraint.left if constraint else ())
        self._socket.send_multipart([frontend, messages.encode(accepted)])
        self._job_of.update(dict.fromkeys(job.requests, job))
        self._open_of[job.client] += job.open

    def _stop(self, frontend: bytes, asked: messages.Stop) -> None:
        if (job := self._jobs.get((frontend, asked.first))) is None:
            return
        request = job.requests[asked.prompt]
        if request.choices[asked.choice].finish_reason is None:
            self.engine.stop(request, asked.choice)
            self._ended(job, 1)

    def _abort(self, frontend: bytes, first: int) -> None:
        self._compiling.pop((frontend, first), None)
        if job := self._jobs.get((frontend, first)):
            for request in job.requests:
                self.engine.abort(request)
            self._ended(job, job.open)

    def _ended(self, job: _Job, choices: int) -> None:
        """Record that `choices` more choices of a job have ended. When all have, the job is forgotten."""
        job.open -= choices
        self._open_of[job.client] -= choices
        if not self._open_of[job.client]:
            del self._open_of[job.client]
        if not job.open:
            del self._jobs[job.key]
            for request in job.requests:
                del self._job_of[request]

    def _step(self) -> None:
        began = self._step_began or perf_counter()
        step = self.engine.step(trace=self.tracing)
        now = self._step_began = perf_counter()
        self.row.put(progress_at=monotonic())
        self._tell()  # before tokens are sent, so that the metrics already count an answer when its client has it
        for index in step.tokens.begun:
            for score in _scores(step.sequence[index]):
                self._socket.send_multipart([self._frontends[step.reader[index]], messages.encode(score)])
        for reader in np.unique(step.reader).tolist():
            mine = messages.encode(_some(step.tokens, step.reader == reader))
            self._socket.send_multipart([self._frontends[reader], mine])
        for sequence in step.sequence[step.tokens.finish > 0]:
            self._ended(self._job_of[sequence.request], 1)
        for sequence in step.failed:
            if job := self._job_of.get(sequence.request):
                with self._refusing(job.key):
                    self._abort(*job.key)
                    raise MegakernelError(f"generation cannot continue: {sequence.stuck}")
        for observer in list(self.on_step):
            try:
                observer(step, now - began)
            except Exception:
                log.exception("an observer of steps failed; it is not called again")
                self.on_step.remove(observer)

    def _waiting(self) -> int:
        """Return the number of unfinished choices that do not run, including those that wait for their grammar."""
        compiling = sum(len(asked.prompts) * asked.params.n for asked in self._compiling.values())
        return max(0, self._open_of.total() - self.engine.stats.running) + compiling

    def _tell(self) -> None:
        """Write the engine's state and counters to the shared memory that all HTTP server processes read."""
        stats = dict(vars(self.engine.stats)) | {"open": self._open_of.total(), "waiting": self._waiting()}
        self.row.put(**vars(stats.pop("counts")), **stats)
        self.row.count_cpu()


def _scores(sequence: Sequence) -> Iterator[Score]:
    """Yield a prompt's log-probabilities, if requested, up to _SCORES tokens at a time, for its first choice only."""
    request = sequence.request
    if sequence.choice == 0 and request.params.prompt_logprobs is not None:
        for at in range(0, max(1, len(request.prompt_logprobs)), _SCORES):
            part = slice(at, at + _SCORES)
            yield Score(request.first, request.prompt_logprobs[part], request.prompt_top_logprobs[part])


def _some(tokens: Tokens, mine: NDArray[np.bool_]) -> Tokens:
    """Return the tokens of one reader, those for which `mine` is True."""
    if mine.all():
        return tokens

    def kept(by_index: dict[int, T]) -> dict[int, T]:
        return {int(np.count_nonzero(mine[:i])): one for i, one in by_index.items() if mine[i]}

    columns = {name: getattr(tokens, name)[mine] for name in ("choice", "token_id", "logprob", "finish")}
    return msgspec.structs.replace(tokens, **columns, top=kept(tokens.top), begun=kept(tokens.begun))
