"""Runs an engine in its own thread and takes requests from frontends over ZeroMQ.

The thread takes the messages that came since the last step, runs a step, and sends each frontend its tokens in one
message. Sending never blocks. If a frontend reads slowly, its tokens are kept in memory. Their number is bounded,
because `max_tokens` limits the tokens of each answer, and the number of waiting answers is limited too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, perf_counter

import zmq

from megakernel.errors import MegakernelError
from megakernel.serving.engine.constraint import Constraint
from megakernel.serving.engine.engine import Engine, Step
from megakernel.serving.engine.grammars import Grammars
from megakernel.serving.engine.request import Request
from megakernel.serving.server.board import Row
from megakernel.serving.server.compiling import Compiling
from megakernel.serving.server.jobs import Addresses, Job, Owner
from megakernel.serving.server.messages import (
    Abort,
    Close,
    Compiled,
    Dead,
    Gone,
    Refused,
    Stop,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
    prompt_ids,
)

log = logging.getLogger(__name__)

CONTROL = b"server"  # the only sender that may send Gone and Close
_GRAMMARS = b"grammars"  # the only sender that may send Compiled


class EngineLoop:
    """Runs `engine`. No other code may call the engine between `start` and the end of `close`.

    Frontends connect to `address`. At most `max_waiting` choices of one client may wait for their first step, and at
    most twice as many of all clients together, so that no client alone fills the queue. Further requests are refused.
    The callbacks in `on_step` run in the engine's thread after each step. They get the step and its wall time in
    seconds, which begins when the previous step ended or, after a pause, when the step began. `on_death` runs in that
    thread when the engine has failed.
    """

    def __init__(
        self,
        engine: Engine,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        row: Row,
        *,
        max_waiting: int,
        grammars: Grammars,
    ) -> None:
        self.engine = engine
        self.row = row
        self.on_step: list[Callable[[Step, float], None]] = []
        self.wants_trace: Callable[[], bool] = lambda: False  # called before each step
        self.on_death: Callable[[], None] = lambda: None
        self._max_waiting = max_waiting
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._control = context.socket(zmq.DEALER)
        self._control.set(zmq.IDENTITY, CONTROL)
        self._control.connect(address)
        self._told = context.socket(zmq.DEALER)  # tells the engine that a grammar is compiled
        self._told.set(zmq.IDENTITY, _GRAMMARS)
        self._told.connect(address)
        self._grammars = Compiling(grammars)
        self._compiled: dict[tuple[bytes, int], Constraint | MegakernelError] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stop_compiling = threading.Event()
        self._compiler = threading.Thread(
            target=engine.programs.warm, args=(self._stop_compiling,), name="compile", daemon=True
        )
        # Only the engine's thread uses the following fields.
        self.owners: dict[Request, Owner] = {}  # the requests with unfinished choices
        self._jobs: dict[tuple[bytes, int], Job] = {}
        self._addresses = Addresses()
        self._open = 0  # number of unfinished choices
        self._open_of: Counter[str] = Counter()  # number of unfinished choices, by client
        self._compiling: dict[tuple[bytes, int], Submit] = {}  # jobs whose grammar is being compiled
        self._frontends: set[bytes] = set()
        self._gone: set[bytes] = set()
        self._closing = False
        self._step_began = 0.0
        self._tell()

    def start(self) -> None:
        """Start the threads: one runs steps, one compiles programs before they are needed, one compiles grammars."""
        self._grammars.start()
        self._thread.start()
        self._compiler.start()

    def forget(self, frontend: bytes) -> None:
        """Abort all jobs of a frontend that has exited. Call `forget` and `close` from the same thread."""
        self._control.send(encode(Gone(frontend)))

    def close(self) -> None:
        """Let the threads finish the current step and compilation, end them, and abort the remaining requests."""
        self._stop_compiling.set()
        self._control.send(encode(Close()))
        self._thread.join()
        self._compiler.join()
        self._grammars.close()
        self._told.close(linger=0)
        self._control.close(linger=0)
        self._socket.close(linger=1000)

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for frontend, message in self._received():
                    self._handle(frontend, message)
                if not self.engine.idle:
                    self._step()
                self._tell()
            for request in list(self.owners):
                self.engine.abort(request)
        except Exception as e:
            log.exception("the engine stopped")
            reason = str(e) if isinstance(e, MegakernelError) else "the server's log has the reason"
            self._die(f"the engine has stopped, restart the server: {reason}")

    def _die(self, why: str) -> None:
        """Tell every frontend that the engine is dead, and answer later messages in the same way until Close comes."""
        for frontend in self._frontends:
            self._socket.send_multipart([frontend, encode(Dead(why))])
        self.on_death()
        while True:
            frontend, data = self._socket.recv_multipart()
            if frontend == CONTROL and isinstance(decode_to_engine(data), Close):
                return
            self._socket.send_multipart([frontend, encode(Dead(why))])

    def _received(self) -> Iterator[tuple[bytes, ToEngine]]:
        """Yield the messages that have arrived. If the engine is idle, first wait until a message arrives."""
        if self.engine.idle:
            self._step_began = 0.0
            self._socket.poll()
        while True:
            try:
                frontend, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frontend, decode_to_engine(data)

    def _handle(self, frontend: bytes, message: ToEngine) -> None:
        if frontend == CONTROL:
            if isinstance(message, Close):
                self._closing = True
            elif isinstance(message, Gone):
                self._gone.add(message.frontend)
                self._frontends.discard(message.frontend)
                for job in [job for job in (*self._jobs, *self._compiling) if job[0] == message.frontend]:
                    self._abort(*job)
            return
        if frontend == _GRAMMARS and isinstance(message, Compiled):
            self._take_compiled(message.frontend, message.first)
            return
        if frontend in self._gone:
            return
        self._frontends.add(frontend)
        match message:
            case Submit():
                self._submit(frontend, message)
            case Stop():
                self._stop(frontend, message)
            case Abort(first):
                self._abort(frontend, first)

    def _submit(self, frontend: bytes, asked: Submit) -> None:
        """Queue a job now, or when its constraint is compiled."""
        if not asked.params.constrained:
            self._queue(frontend, asked)
            return
        key = frontend, asked.first
        try:
            if constraint := self._grammars.known(asked.params):
                self._queue(frontend, asked, constraint)
            elif self._waiting() + len(asked.prompts) * asked.params.n > self._max_waiting:
                self._queue(frontend, asked)  # `_queue` will refuse the job, because too many choices wait
            else:
                self._compiling[key] = asked
                self._grammars.ask(asked.params, partial(self._answer_compiled, key))
        except MegakernelError as e:
            self._refuse(frontend, asked.first, str(e))

    def _answer_compiled(self, key: tuple[bytes, int], result: Constraint | MegakernelError) -> None:
        """Hand the result of a compilation to the engine's thread. This runs in the thread that compiles grammars."""
        self._compiled[key] = result
        self._told.send(encode(Compiled(*key)))

    def _take_compiled(self, frontend: bytes, first: int) -> None:
        result, asked = self._compiled.pop((frontend, first)), self._compiling.pop((frontend, first), None)
        if asked is None:
            return  # aborted
        if isinstance(result, MegakernelError):
            self._refuse(frontend, first, str(result))
        else:
            self._queue(frontend, asked, result)

    def _refuse(self, frontend: bytes, first: int, why: str, *, later: bool = False) -> None:
        self._socket.send_multipart([frontend, encode(Refused(first, why, later))])

    def _queue(self, frontend: bytes, asked: Submit, constraint: Constraint | None = None) -> None:
        """Queue all prompts of a job for the engine, or refuse the job."""
        n, count = asked.params.n, len(asked.prompts) * asked.params.n
        waiting, most = self._waiting(), self._max_waiting
        own = min(waiting, self._open_of[asked.client])  # an upper bound: some of these choices may be running
        later = False
        try:
            if count > most:
                raise MegakernelError(
                    f"{len(asked.prompts)} prompts with n={n} exceed the limit of {most} waiting sequences"
                )
            for already, allowed in ((own, most), (waiting, 2 * most)):
                if already + count > allowed:
                    later = True
                    raise MegakernelError(
                        f"{already} sequences are waiting already and at most {allowed} may wait: try again later"
                    )
            prompts = [prompt_ids(prompt) for prompt in asked.prompts]
            # `add` checks a prompt too, but only after the prompts before it are queued.
            for prompt in prompts if len(prompts) > 1 else ():
                self.engine.check(prompt, asked.params)
            requests = [
                self._add(prompt, asked, frontend, index * n, constraint) for index, prompt in enumerate(prompts)
            ]
        except MegakernelError as e:
            self._refuse(frontend, asked.first, str(e), later=later)
            return
        if not self._jobs:
            self.row.put(progress_at=monotonic())
        job = self._jobs[frontend, asked.first] = Job(frontend, asked.first, asked.client, count, requests)
        self._open += count
        self._open_of[asked.client] += count
        for request in requests:
            self.owners[request] = Owner(job, n)

    def _add(
        self, prompt: list[int], asked: Submit, frontend: bytes, first: int, constraint: Constraint | None
    ) -> Request:
        """Queue one prompt of a job. `first` is the number of the prompt's first choice within the job."""
        tag = self._addresses.take(frontend, asked.first + first)
        try:
            return self.engine.add(prompt, asked.params, tag=tag, client=asked.client, constraint=constraint)
        except MegakernelError:
            self._addresses.give(tag)
            raise

    def _stop(self, frontend: bytes, asked: Stop) -> None:
        job = self._jobs.get((frontend, asked.first))
        request = job.requests[asked.prompt] if job else None
        if request in self.owners and request.choices[asked.choice].finish_reason is None:
            self.engine.stop(request, asked.choice)
            self._ended(request, 1)

    def _abort(self, frontend: bytes, first: int) -> None:
        self._compiling.pop((frontend, first), None)
        if job := self._jobs.get((frontend, first)):
            for request in job.requests:
                if owner := self.owners.get(request):
                    self.engine.abort(request)
                    self._ended(request, owner.open)

    def _ended(self, request: Request, choices: int) -> None:
        """Record that `choices` more of a request's choices have ended.

        A request is dropped when its last choice has ended, and a job when its last request has ended.
        """
        owner = self.owners[request]
        owner.open -= choices
        owner.job.open -= choices
        self._open -= choices
        self._open_of[owner.job.client] -= choices
        if not self._open_of[owner.job.client]:
            del self._open_of[owner.job.client]
        if not owner.open:
            del self.owners[request]
            self._addresses.give(request.tag)
        if not owner.job.open:
            del self._jobs[owner.job.frontend, owner.job.first]

    def _step(self) -> None:
        began = self._step_began or perf_counter()
        step = self.engine.step(trace=self.wants_trace())
        now = self._step_began = perf_counter()
        self.row.put(progress_at=monotonic())
        self._tell()  # before tokens are sent, so that a client that has an answer finds it counted in the metrics
        for frontend, tokens in self._addresses.sort(step.tokens, now).items():
            self._socket.send_multipart([frontend, encode(tokens)])
        for sequence in step.tokens.sequence[step.tokens.finish > 0]:
            self._ended(sequence.request, 1)
        for sequence in step.failed:
            if owner := self.owners.get(sequence.request):
                self._refuse(owner.job.frontend, owner.job.first, f"generation cannot continue: {sequence.stuck}")
                self._abort(owner.job.frontend, owner.job.first)
        for observer in list(self.on_step):
            try:
                observer(step, now - began)
            except Exception:
                log.exception("an observer of steps failed; it is not called again")
                self.on_step.remove(observer)

    def _waiting(self) -> int:
        """Return the number of choices that have not taken part in a step yet."""
        compiling = sum(len(asked.prompts) * asked.params.n for asked in self._compiling.values())
        return max(0, self._open - self.engine.stats.running) + compiling

    def _tell(self) -> None:
        """Publish the engine's state and counters on the board, where every frontend reads them."""
        stats = self.engine.stats
        counts = stats.counts
        self.row.put(
            open=self._open,
            running=stats.running,
            waiting=self._waiting(),
            pages=stats.pages,
            pages_used=stats.pages_used,
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            generated=counts.generated,
            turns=counts.turns,
            proposed=counts.proposed,
            accepted=counts.accepted,
        )
        self.row.count_cpu()
