"""Connects a frontend (HTTP server process) with the engine in another process, and collects the engine's answers on an
asyncio event loop. Up to 64 messages are read at once, so a frontend that lags behind gets several tokens together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.serving.engine.sampling import Begun, SamplingParams, Score, TokenIds, Tokens
from megakernel.serving.server import messages
from megakernel.serving.server.board import ENGINE_FIELDS, Board
from megakernel.serving.text.codec import Token, Transcript, single_tokens

if TYPE_CHECKING:  # not imported at run time, so that `AsyncLLM` works without the packages for metrics
    from megakernel.serving.server.metrics import Metrics

FinishReason = Literal["stop", "length"]
_AT_ONCE = 64  # maximum number of messages to read before other tasks of the event loop have their turn
# Maximum work of one `take`, before other tasks of the event loop have their turn: about 10 ms. One unit is a token, a
# log-probability that the answer shows, or a stop string (or 32 characters of one) that each token is compared with.
MOST_WORK = 2048


def unpack(kind: Any, data: Any) -> Any:
    """Return the array that has the bytes `data`. `kind` is its type, such as NDArray[np.int32]."""
    return np.frombuffer(data, get_args(get_args(kind)[1])[0])


_decode = msgspec.msgpack.Decoder(messages.ToFrontend, dec_hook=unpack).decode


class EngineDead(MegakernelError):
    """The engine has stopped, so no request can be answered any more."""


class Overloaded(MegakernelError):
    """Too many requests are waiting. The request may succeed later."""


@dataclass(slots=True)
class Delta:
    """The new text and tokens of one choice (completion). `index` is the number of the choice among the choices of all
    prompts, and `prompt` is the number of its prompt. `text` contains only text that later tokens cannot change."""

    index: int
    prompt: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or the id of `stop_token_ids` that ended the choice


class Answers:
    """The choices (completions) of prompts that are submitted together, while the engine generates them. `transcripts`
    has a new transcript for each choice, prompt by prompt.

    Only the event loop's thread may use it. A caller that stops before `finished` is true must call `close`. Choice c
    of prompt p has the number p * n + c, where `n` is the number of choices per prompt."""

    def __init__(
        self, client: EngineClient, prompts: Seq[TokenIds], params: SamplingParams, transcripts: list[Transcript]
    ) -> None:
        self.first, self.params, self.n = 0, params, params.n
        self.submitted_at = perf_counter()
        self.transcripts = transcripts  # the text of each choice
        # Maps a prompt's number to the log-probabilities of its tokens except the first, and of the most likely ids at
        # their positions, if requested. They are complete when the prompt's first token arrives.
        self.scores: dict[int, tuple[list[float], list[dict[int, float]]]] = {}
        # The JSON Schema keywords that the answers may violate; None until the engine has accepted the prompts.
        self.unenforced: tuple[str, ...] | None = None
        self.pooled: dict[int, NDArray[np.float32]] = {}  # prompt -> its last or mean hidden state, if requested
        self.admitted: dict[int, float] = {}  # choice -> when the engine first admitted it
        self.cached = self.completion_tokens = 0  # `cached` prompt tokens were found in the prefix cache so far
        self._left = len(transcripts)  # number of choices whose end `take` has not returned
        self._client, self._metrics, self.prompts = client, client.metrics, prompts
        self.prompt_tokens = sum(map(len, prompts))
        work = 1 + (params.logprobs or 0) + sum(1 + len(stop) // 32 for stop in params.stop_strings)
        self._most = max(1, MOST_WORK // work)  # maximum number of tokens of one `take`
        self._tokens: deque[Token] = deque()  # those that have arrived since the last `take`
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def finished(self) -> bool:
        return not self._left

    async def accepted(self) -> None:
        """Wait until the engine has accepted the prompts. Raises the same errors as `take`."""
        while self.unenforced is None:
            await self._woken()

    async def take(self, *, singly: bool = False) -> list[Delta]:
        """Wait for new tokens. Returns one delta per choice that has new tokens, or one per token if `singly` is set.
        One call handles tokens worth at most MOST_WORK units. If the engine cannot answer, `take` raises the error that
        `EngineClient.submit` describes."""
        deltas: list[Delta] = []
        while not deltas:
            for index, tokens in (await self._arrived()).items():
                parts = [[token] for token in tokens] if singly else [tokens]
                deltas += [delta for part in parts if (delta := self._add(index, part)).tokens]
        return deltas

    async def complete(self) -> None:
        """Wait until all choices are complete."""
        while not self.finished:
            await self.take()

    def close(self) -> None:
        """Abort the choices that are not finished."""
        if self._metrics and self._left and self.unenforced is not None:
            self._metrics.aborted(self._left)
            self._metrics = None
        self._client.abort(self)

    def put(self, token: Token) -> None:
        """Keep a token for the next `take`."""
        self._tokens.append(token)
        self._news.set()

    def begin(self, index: int, begun: Begun) -> None:
        """Store the data in `begun`, which the engine sends with the first token of the choice number `index`."""
        self.admitted[index] = begun.admitted
        self.cached += begun.cached
        if begun.pooled is not None:
            self.pooled[index // self.n] = begun.pooled

    def put_scores(self, part: Score) -> None:
        """Keep a part of a prompt's log-probabilities."""
        logprobs, tops = self.scores.setdefault((part.choice - self.first) // self.n, ([], []))
        logprobs += part.logprobs
        tops += part.tops

    def accept(self, unenforced: tuple[str, ...]) -> None:
        if self._metrics:
            self._metrics.prompts(self.prompts)
        self.unenforced = unenforced
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    async def _arrived(self) -> dict[int, list[Token]]:
        """Wait for tokens, and return a dict: choice -> its tokens. One dict has at most `_most` tokens."""
        while not self._tokens:
            await self._woken()
        if len(self._tokens) > self._most:
            await asyncio.sleep(0)
        taken: dict[int, list[Token]] = {}
        for _ in range(min(self._most, len(self._tokens))):
            token = self._tokens.popleft()
            taken.setdefault(token.choice - self.first, []).append(token)
        return taken

    async def _woken(self) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._news.wait()

    def _add(self, index: int, tokens: list[Token]) -> Delta:
        """Append tokens to the choice number `index` until it ends. Returns the choice's new text and tokens."""
        transcript, metrics = self.transcripts[index], self._metrics
        delta = Delta(index, index // self.n)
        if transcript.finish_reason is not None:
            return delta  # a stop string has ended this choice, but the engine did not know that yet
        for token in tokens:
            before = transcript.last_at
            delta.text += transcript.add(token)
            delta.tokens.append(token)
            if metrics:
                metrics.token(token.at, before, self.submitted_at)
            if transcript.finish_reason is not None:
                delta.finish_reason = reason = "stop" if transcript.finish_reason == "stop" else "length"
                delta.stop_reason = transcript.stop_reason
                self._client.stop(self, index)  # no effect if the engine has already ended the choice
                self._left -= 1
                if metrics:
                    times = self.submitted_at, self.admitted[index], transcript.first_at, token.at
                    metrics.finished(reason, len(transcript.token_ids), *times)
                break
        self.completion_tokens += len(delta.tokens)
        return delta


class EngineClient:
    """Connects the HTTP server process `name` to the engine at the addresses in `description`, on one event loop.
    `metrics` counts requests and tokens."""

    def __init__(self, description: messages.Description, name: str, metrics: Metrics | None = None) -> None:
        self.dead: EngineDead | None = None
        self.metrics = metrics
        self.row = Board(description.board, description.rows).row(0, ENGINE_FIELDS)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, name.encode())
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(description.requests)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = 0
        self._choices: dict[int, Answers] = {}  # number of an unfinished choice -> its answers
        self._looking: deque[asyncio.Future[bytes | None]] = deque()  # queries for a timeline, oldest first

    def start(self) -> None:
        """Begin to read messages on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._requests.fileno(), self._read)

    def close(self) -> None:
        """Abort the remaining answers and close the socket."""
        self.fail_all(Overloaded("the server has stopped"))
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._requests.fileno())
        self._requests.close(linger=1000)
        self._context.term()

    def submit(self, answers: Answers, client: str = "", seed: int | None = None) -> Answers:
        """Submit a client's prompts, and return `answers`. `seed` makes the random seeds reproducible (see
        `messages.Submit`). Raises EngineDead if the engine is known to be dead. `Answers.take` may raise Overloaded or
        EngineDead later. It raises another MegakernelError if a prompt can never run, or if a constraint (such as a
        grammar) allows no next token."""
        if self.dead is not None:
            raise self.dead
        answers.first = self._next
        self._next += len(answers.transcripts)
        self._choices.update(dict.fromkeys(range(answers.first, self._next), answers))
        prompts = [ids.tobytes() for ids in answers.prompts]
        self._send(messages.Submit(answers.first, prompts, answers.params, client, seed))
        return answers

    def stop(self, answers: Answers, number: int) -> None:
        """End a choice (completion), because its text contains a stop string. Does nothing if it has ended."""
        if self._choices.pop(answers.first + number, None):
            self._send(messages.Stop(answers.first, *divmod(number, answers.n)))

    def abort(self, answers: Answers) -> None:
        """Abort all choices that were submitted together. Does nothing if they have ended."""
        if self._drop(answers):
            self._send(messages.Abort(answers.first))

    def fail_all(self, error: MegakernelError) -> None:
        """Abort all requests. Whoever waits for an answer gets `error`."""
        for answers in set(self._choices.values()):
            self.abort(answers)
            answers.fail(error)

    def die(self, why: str) -> None:
        """Record that the engine is dead, and fail all answers and queries with EngineDead."""
        self.dead = EngineDead(why)
        for answers in set(self._choices.values()):
            self._drop(answers)
            answers.fail(self.dead)
        for future in self._looking:
            if not future.done():
                future.set_exception(self.dead)

    def stalled_for(self) -> float:
        """Return the seconds since the last step ended, or 0 if the engine has no work."""
        return monotonic() - self.row.get("progress_at") if self.row.get("open") else 0.0

    async def timeline(self) -> bytes | None:
        """Ask the engine's process for the HTML page of a traced step. Returns None if no step has been traced."""
        if self.dead is not None:
            raise self.dead
        self._looking.append(asyncio.get_running_loop().create_future())
        self._send(messages.Look())
        return await self._looking[-1]

    def _send(self, message: messages.ToEngine) -> None:
        self._requests.send(messages.encode(message))
        # ZeroMQ's file descriptor signals an arriving message only once, and sending may consume that signal. So read
        # after each send: otherwise a message that has arrived could stay unread.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Handle up to _AT_ONCE messages, and stop after a `Score`, which takes long. Another call handles the rest."""
        if self._requests.closed:
            return
        for _ in range(_AT_ONCE):
            try:
                message = _decode(self._requests.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case Tokens():
                    self._deliver(message)
                case Score():
                    if answers := self._choices.get(message.choice):
                        answers.put_scores(message)
                    break
                case messages.Refused(first, why, later):
                    if answers := self._choices.get(first):
                        self._drop(answers)
                        answers.fail(Overloaded(why) if later else MegakernelError(why))
                case messages.Accepted(first, keywords):
                    if answers := self._choices.get(first):
                        answers.accept(keywords)
                case messages.Seen(content):
                    future = self._looking.popleft()
                    if not future.done():  # otherwise the client has left
                        future.set_result(content)
                case messages.Dead(why):
                    self.die(why)
        assert self._loop is not None
        self._loop.call_soon(self._read)

    def _deliver(self, tokens: Tokens) -> None:
        choices = self._choices
        for index, begun in tokens.begun.items():
            if answers := choices.get(number := int(tokens.choice[index])):
                answers.begin(number - answers.first, begun)
        for token in single_tokens(tokens):
            answers = choices.get(token.choice)
            if answers is None:
                continue  # the choice was stopped, but the engine did not know that yet
            answers.put(token)
            if token.finish_reason is not None:
                del choices[token.choice]

    def _drop(self, answers: Answers) -> bool:
        """Forget the choices that were submitted together. Returns whether the engine has not ended all of them."""
        numbers = range(answers.first, answers.first + len(answers.transcripts))
        found = [self._choices.pop(number, None) for number in numbers]
        return any(found)
