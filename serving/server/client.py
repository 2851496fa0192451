"""A frontend's client of the engine in another process, for use in an asyncio event loop.

The client reads up to 64 messages before other tasks of the event loop run, so a frontend that lags behind gets several
tokens of a choice together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import msgspec
import zmq

from megakernel.errors import MegakernelError
from megakernel.serving.engine.sampling import FINISH, SamplingParams
from megakernel.serving.server.board import ENGINE_FIELDS, Board
from megakernel.serving.server.messages import (
    Abort,
    Dead,
    Description,
    Hello,
    Look,
    Refused,
    Stop,
    Submit,
    Tokens,
    decode_seen,
    decode_to_frontend,
    encode,
    prompt_bytes,
    token_rows,
)

_AT_ONCE = 64  # messages that are read before other tasks of the event loop have their turn


class EngineDead(MegakernelError):
    """The engine has stopped, so no request can be answered any more."""


class Overloaded(MegakernelError):
    """Too many requests are waiting. The request may succeed later."""


class Piece(msgspec.Struct, gc=False):
    """A generated token of one choice. `at` is the `perf_counter` time in seconds when the token's step ended."""

    token_id: int
    logprob: float
    top_logprobs: dict[int, float]
    finish_reason: str | None
    at: float


@dataclass(eq=False)
class Job:
    """Prompts that were submitted together. Only the event loop's thread may use a job.

    `n` is the number of choices per prompt, and choice c of prompt p has the number p * n + c within the job. `open`
    counts the choices that have not ended. `cached` counts the prompt tokens that were found in the prefix cache, over
    all prompts that have begun.

    If prompt log-probabilities were requested, `scores` maps the number of a prompt to a pair of lists. Both have an
    element for each prompt token except the first. The first list has the log-probability of each token, and the second
    list has the most likely ids at the token's position. The entry of a prompt appears with its first generated token.
    """

    first: int
    prompts: int
    n: int
    submitted_at: float
    open: int
    cached: int = 0
    scores: dict[int, tuple[list[float], list[dict[int, float]]]] = field(default_factory=dict)
    _pieces: dict[int, list[Piece]] = field(default_factory=dict)
    _error: Exception | None = None
    _waiter: asyncio.Future[None] | None = None

    async def take(self) -> dict[int, list[Piece]]:
        """Wait for new tokens, and return those that arrived since the last call, as {choice number: tokens}.

        Call `take` only while choices are open. If the job has failed, `take` raises the job's error.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, {}
        return pieces

    def put(self, number: int, piece: Piece) -> None:
        if (pieces := self._pieces.get(number)) is None:
            self._pieces[number] = [piece]
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        else:
            pieces.append(piece)

    def fail(self, error: Exception) -> None:
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Connects the frontend `name` to the engine at the addresses in `description`.

    A client belongs to one event loop.
    """

    def __init__(self, description: Description, name: str) -> None:
        self.dead: EngineDead | None = None
        self.row = Board(description.board, description.rows).row(0, ENGINE_FIELDS)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._connect(description.requests, name)
        self._looks = self._connect(description.looks, name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = 0
        self._choices: dict[int, Job] = {}  # number of an open choice, unique in this frontend -> its job
        self._asked: dict[int, asyncio.Future[bytes | None]] = {}

    def _connect(self, address: str, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, name.encode())
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(address)
        return socket

    def start(self) -> None:
        """Begin to read messages on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._requests.fileno(), self._read)
        self._loop.add_reader(self._looks.fileno(), self._read_looks)
        self._send(Hello())
        self._loop.call_soon(self._read_looks)

    def close(self) -> None:
        """Abort the remaining jobs and close the sockets."""
        self.fail_all(Overloaded("the server has stopped"))
        for socket in (self._requests, self._looks):
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(socket.fileno())
            socket.close(linger=1000)
        self._context.term()

    def submit(self, prompts: Seq[Seq[int]], params: SamplingParams, client: str) -> Job:
        """Submit a client's prompts. Raises EngineDead if the engine is known to be dead.

        `Job.take` may raise an error later: Overloaded, EngineDead, or another MegakernelError if the job can never
        run or if a constraint allows no next token.
        """
        if self.dead is not None:
            raise self.dead
        count = len(prompts) * params.n
        job = Job(self._next, len(prompts), params.n, perf_counter(), count)
        self._next += count
        for number in range(job.first, self._next):
            self._choices[number] = job
        self._send(Submit(job.first, [prompt_bytes(prompt) for prompt in prompts], params, client))
        return job

    def stop(self, job: Job, number: int) -> None:
        """End one choice whose reader found a stop string. Does nothing if the choice has ended."""
        if self._choices.pop(job.first + number, None):
            job.open -= 1
            self._send(Stop(job.first, *divmod(number, job.n)))

    def abort(self, job: Job) -> None:
        """Abort a job. Does nothing if the job has ended."""
        if job.open:
            self._drop(job)
            self._send(Abort(job.first))

    def fail_all(self, error: MegakernelError) -> None:
        """Abort every job. The readers of the jobs get `error`."""
        for job in set(self._choices.values()):
            self.abort(job)
            job.fail(error)

    def die(self, why: str) -> None:
        """Record that the engine is dead, and fail all jobs and queries with EngineDead."""
        self.dead = EngineDead(why)
        for job in set(self._choices.values()):
            self._drop(job)
            job.fail(self.dead)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.dead)

    def stalled_for(self) -> float:
        """Return the seconds since the last step ended, or 0 if the engine has no work."""
        return monotonic() - self.row.get("progress_at") if self.row.get("open") else 0.0

    async def look(self, what: str) -> bytes | None:
        """Ask the engine's process for `what`: ROOFLINE (the record of steps, JSON) or TIMELINE (a traced step, HTML).

        Returns None for TIMELINE if no step has been traced.
        """
        if self.dead is not None:
            raise self.dead
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._looks.send(encode(Look(number, what)))
        asyncio.get_running_loop().call_soon(self._read_looks)
        try:
            return await future
        finally:
            del self._asked[number]

    def _send(self, message: Hello | Submit | Stop | Abort) -> None:
        self._requests.send(encode(message))
        # ZeroMQ's file descriptor signals an arriving message only once, and sending may consume that signal. So read
        # after each send: otherwise a message that has arrived could stay unread.
        assert self._loop is not None
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Handle the messages that have arrived, at most _AT_ONCE at a time."""
        if self._requests.closed:
            return
        for _ in range(_AT_ONCE):
            try:
                message = decode_to_frontend(self._requests.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case Tokens():
                    self._deliver(message)
                case Refused(first, why, later):
                    if job := self._choices.get(first):
                        self._drop(job)
                        job.fail(Overloaded(why) if later else MegakernelError(why))
                case Dead(why):
                    self.die(why)
        assert self._loop is not None
        self._loop.call_soon(self._read)

    def _deliver(self, tokens: Tokens) -> None:
        choices, at, tops = self._choices, tokens.at, tokens.tops
        for score in tokens.scores:
            if job := choices.get(score.choice):
                job.scores[(score.choice - job.first) // job.n] = score.logprobs, score.tops
        for number, cached in tokens.cached.items():
            if job := choices.get(number):
                job.cached += cached
        for row, (number, token, logprob, code) in enumerate(token_rows(tokens)):
            job = choices.get(number)
            if job is None:
                continue  # the engine generated the token before it learned that the choice was stopped
            top = tops.get(row, _NO_TOP) if tops else _NO_TOP
            job.put(number - job.first, Piece(token, logprob, top, FINISH[code], at))
            if code:
                del choices[number]
                job.open -= 1

    def _drop(self, job: Job) -> None:
        for number in range(job.first, job.first + job.n * job.prompts):
            self._choices.pop(number, None)
        job.open = 0

    def _read_looks(self) -> None:
        while not self._looks.closed:
            try:
                seen = decode_seen(self._looks.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            future = self._asked.get(seen.number)
            if future is not None and not future.done():
                future.set_result(seen.content)


_NO_TOP: dict[int, float] = {}
