"""Tests that if a replica is lost, another one continues its answers, bit for bit."""

# ruff: noqa: E402

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import extras
import pytest

extras.needs("ray")

from api_support import Live, by_choice, serving, until
from schemas import closed

from megakernel import LLM
from megakernel.serving.replicas import relay as module
from megakernel.serving.replicas.relay import relay
from megakernel.serving.replicas.server_process import Head, Part, _passed_on
from megakernel.serving.server.client import EngineDead, Overloaded
from megakernel.serving.server.writer import HEADER, KEY, MARK, REPLAYED, WAITING, EventStream, Replay, Replayed

Ask = Callable[[Replay], AsyncGenerator[Part]]


@pytest.fixture(autouse=True)
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "key")
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0)
    monkeypatch.setattr(module, "_MOST_KEPT", 1 << 21)


async def runs() -> bool:
    return True


async def answered(ask: Ask) -> tuple[int, bytes]:
    """Relay a request, and return the status and the body that the client gets."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await relay(ask, runs, 60.0, {"type": "http"}, None, send)  # type: ignore[arg-type]
    start, *body = messages
    assert [message["type"] for message in body] == ["http.response.body"] * len(body)
    assert [message.get("more_body", False) for message in body] == [True] * (len(body) - 1) + [False]
    return start["status"], b"".join(message["body"] for message in body)


# -- two servers

CONTEXT = 1024
PERSON = closed(name={"type": "string", "maxLength": 2}, kind={"enum": ["alpha", "beta"]})
TOOLS = [{"type": "function", "function": {"name": "person", "parameters": PERSON}}]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALLED = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}, "max_tokens": 60}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "x", "temperature": 0, "logprobs": 2, "max_tokens": 9, **STREAM}),
    "seeded": (COMPLETIONS, {"prompt": "x", "seed": 3, "max_tokens": 8, "ignore_eos": True, **STREAM}),
    "characters": (COMPLETIONS, {"prompt": "x", "max_tokens": 12, "bad_words": ["a"], "stream": True}),
    "stops": (COMPLETIONS, {"prompt": "x", "stop": ["\ufffd" * 4, "qqq"], "max_tokens": 24, "stream": True}),
    "choices": (COMPLETIONS, {"prompt": ["x", "x"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 5, **STREAM}),
    "ids": (COMPLETIONS, {"prompt": [1, 2], "n": 3, "return_token_ids": True, "max_tokens": 6, "stream": True}),
    "chat": (CHAT, {**HELLO, "n": 2, "logprobs": True, "max_tokens": 5, **STREAM}),
    "calls": (CHAT, {**HELLO, **CALLED, **STREAM}),
    "calls, perhaps": (CHAT, {**HELLO, "tools": TOOLS, "max_tokens": 12, **STREAM}),
    "form": (CHAT, {**HELLO, **FORM, "n": 2, **STREAM}),
    "response": (RESPONSES, {"input": "hi", "max_output_tokens": 6, "top_logprobs": 1, "stream": True}),
    "response, calls": (
        RESPONSES,
        {"input": "hi", "tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"}  # type: ignore[dict-item]
        | {"max_output_tokens": 60, "stream": True},
    ),
    "whole": (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "logprobs": 1, "max_tokens": 5}),
    "whole, calls": (CHAT, {**HELLO, **CALLED}),
    "refused": (CHAT, {**HELLO, "max_tokens": 0}),
    "other": ("/tokenize", {"prompt": "some text"}),
}


@pytest.fixture(scope="module")
def replicas(model: str) -> Iterator[tuple[Live, Live]]:
    """Yield two servers of one model. The second one runs other batches, speculates, and has few KV pages."""
    with (
        LLM(model, max_context=CONTEXT, max_num_seqs=8, threads=1) as one,
        LLM(model, max_context=CONTEXT, max_num_seqs=6, max_num_batched_tokens=16, speculate=3, threads=1) as other,
    ):
        one.model = other.model = "bytes"
        pool = other.engine._batch.pool
        held = pool.take(pool.free - 640 // other.engine.dims.bucket.kv_page)
        with serving(one) as first, serving(other) as second:
            yield first, second
            assert not second.service.engine.dead  # it has enough pages for any one request
            until(first.at_rest)
            pool.give(held)
            until(second.at_rest)


def asked(live: Live, path: str, body: dict[str, Any]) -> Callable[[Replay], tuple[Head, bytes]]:
    """Return a function that asks the server `live` for the rest of an answer. The function's argument, a `Replay`,
    says which tokens the client already has; its result is the head and the body. The seed is always the same, and
    results are cached, so equal calls send one request."""

    @cache
    def once(given: frozenset[tuple[int, int]]) -> tuple[Head, bytes]:
        header = {HEADER: Replay(2**64 - 1, 1, dict(given)).header("key")}
        status, headers, data = live.request("POST", path, body, header)
        return Head(status, list(headers.items()), "kind"), data

    return lambda replay: once(frozenset(replay.given.items()))


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_goes_on_wherever_it_was_cut(name: str, replicas: tuple[Live, Live]) -> None:
    """Two replicas are lost, one after the other, in the middle of an answer. The client still gets the same answer as
    from a replica that is not lost. The test loses the first replica at many places: at regular distances, and around
    some marks (comments in the stream after each token's events). The second replica is lost after one to four fifths
    of its answer."""
    path, body = REQUESTS[name]
    first, second = (asked(live, path, body) for live in replicas)
    head, whole = first(Replay(0, 0))
    marks = list(MARK.finditer(whole))
    around = {end + off for mark in marks[:: 1 + len(marks) // 4] for end in mark.span() for off in (-1, 0, 1)}
    between = range(0, len(whole), 7 if name == "seeded" else max(61, len(whole) // 4))
    cuts = sorted({*around, *between, len(whole)})

    def cut_at(cut: int) -> Ask:
        attempts = enumerate((first, second, first))

        async def ask(replay: Replay) -> AsyncGenerator[Part]:
            number, replica = next(attempts)
            head, data = replica(replay)
            end = (cut, len(data) * (1 + cut % 4) // 5, len(data))[number]
            yield head
            for start in range(0, end, 997):
                yield data[start : min(start + 997, end)]
            if number < 2:
                raise ConnectionError

        return ask

    async def cut_everywhere() -> None:
        shown = MARK.sub(b"", whole) if head.streams else whole
        for cut in cuts:
            status, data = await answered(cut_at(cut))
            assert status == head.status and by_choice(data) == by_choice(shown), cut

    asyncio.run(cut_everywhere())


def test_a_replica_that_preempts_all_the_time_gives_the_same(replicas: tuple[Live, Live]) -> None:
    first, second = replicas
    bodies = [{"prompt": letter * 80, "max_tokens": 200, "ignore_eos": True, "stream": True} for letter in "abcdef"]
    with ThreadPoolExecutor(len(bodies)) as pool:
        stormy = list(pool.map(lambda body: asked(second, COMPLETIONS, body)(Replay(0, 0, {0: 40}))[1], bodies))
    assert second.host.engine.stats.preemptions > 5
    for body, found in zip(bodies, stormy, strict=True):
        _, expected = asked(first, COMPLETIONS, body)(Replay(0, 0))
        assert found == expected.split(b":0\n\n", 40)[40]


def test_prompts_without_a_seed_get_different_ones(replicas: tuple[Live, Live]) -> None:
    _, data = asked(replicas[0], COMPLETIONS, {"prompt": ["x"] * 4, "n": 2, "max_tokens": 30})(Replay(0, 0))
    assert len({choice["text"] for choice in json.loads(data)["choices"]}) == 8


@pytest.mark.parametrize("key", [None, "", "other"])
def test_only_fronts_are_obeyed(key: str | None, replicas: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch) -> None:
    if not key:
        monkeypatch.delenv(KEY) if key is None else monkeypatch.setenv(KEY, "")
    headers = {HEADER: Replay(1, 1, {0: 2}).header(key or "")}
    _, _, data = replicas[0].request("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 3, "stream": True}, headers)
    assert not MARK.search(data) and b'"created":1,' not in data


def test_a_client_cannot_set_the_header() -> None:
    assert _passed_on([("X-Megakernel-Replay", "key {}"), ("Accept", "*/*")]) == [("accept", "*/*")]


@pytest.mark.parametrize("error", [EngineDead("it stopped"), Overloaded("the server is shutting down")])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_stream_that_another_server_can_go_on_with_has_no_end(error: Exception, replayed: bool) -> None:
    async def rest() -> AsyncGenerator[bytes]:
        yield b"2"
        raise error

    async def run() -> list[Any]:
        REPLAYED.set(Replayed(1, 1) if replayed else None)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": COMPLETIONS}
        writer: Any = SimpleNamespace(chunks=rest, last=b"end", filler=b"", answers=SimpleNamespace(close=lambda: None))
        await EventStream(writer, asyncio.ensure_future)(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return sent

    last = asyncio.run(run())[-1]
    assert last["more_body"] is replayed
    assert replayed or (str(error).encode() in last["body"] and last["body"].endswith(b"end"))


# -- the front

SSE = Head(200, [("content-type", "text/event-stream; charset=utf-8")], "kind")
OTHER, BUSY = SSE._replace(kind="other"), SSE._replace(status=503)
JSON = Head(200, [("content-type", "application/json")], "kind")
LOST: Any = ConnectionError("the replica was killed")
TOLD = b'{"error":{"message":"the replica that computed this answer was lost: ask again"'
DONE = b"data: [DONE]\n\n"
ONE, TWO = b"data: 1\n\n", b"data: 2\n\n"


@pytest.mark.parametrize(
    ("attempts", "status", "body"),
    [
        ([[LOST]] * 9 + [[JSON, b"{}"]], 200, b"{}"),
        ([[LOST]] * 10, 503, TOLD),
        ([[JSON, b"{", LOST], [JSON, b"{", b"}"]], 200, b"{}"),
        ([[JSON, b"{", LOST]] * 10, 503, TOLD),
        ([[JSON, *[b"x" * (1 << 20)] * 3]] * 10, 503, TOLD),  # more than the front keeps
        ([[JSON, b"\n:0\n\n"]], 200, b"\n:0\n\n"),  # only streams have marks
        ([[Head(204, [], "kind")]], 204, b""),
        ([[BUSY, b"busy"]], 503, b"busy"),  # passed on, because the client has not received anything yet
        ([[SSE, ONE + b":", b"0\n", b"\nda", LOST], [SSE, TWO + b":0\n\n" + DONE]], 200, ONE + TWO + DONE),
        ([[SSE, ONE + b":0\n\n", LOST], [BUSY, b"busy"], [SSE, DONE]], 200, ONE + DONE),
        ([[SSE, ONE + b":0\n\n" + b"data: {}", LOST]] + [[LOST]] * 9, 200, ONE + b"data: " + TOLD),
        ([[SSE, ONE + b":0\n\n", LOST]] + [[OTHER, TWO]] * 9, 200, ONE + b"data: " + TOLD),
        ([[SSE, WAITING, LOST], [SSE, WAITING, ONE + b":0\n\n" + DONE]], 200, WAITING * 2 + ONE + DONE),
        ([[SSE, ONE, LOST], [OTHER, TWO + b":0\n\n" + DONE]], 200, TWO + DONE),
        ([[SSE, b":0\n\n", LOST]] + [[OTHER, TWO]] * 9, 200, b"data: " + TOLD),
        ([[SSE, ONE + b":0\n\n", LOST]] * 30 + [[SSE, DONE]], 200, ONE * 30 + DONE),
    ],
)
def test_the_front_asks_again(attempts: list[list[Any]], status: int, body: bytes) -> None:
    """If a replica is lost, the front asks another one. The client gets an error after ten attempts in a row that give
    nothing new, or if only replicas with other settings are left."""
    left = iter(attempts)

    async def ask(replay: Replay) -> AsyncGenerator[Part]:
        for part in next(left):
            if part is LOST:
                raise part
            yield part

    found = asyncio.run(answered(ask))
    assert found[0] == status and found[1].startswith(body) and next(left, None) is None
    assert TOLD in body or found[1] == body
    assert found[1].endswith(DONE) == (status == 200 and b"data" in body)


def test_a_long_event_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front does not look for marks again and again while an event arrives in many parts."""
    read: list[int] = []
    mark = Mock(split=lambda data: (read.append(len(data)), MARK.split(data))[1])
    monkeypatch.setattr(module, "MARK", mark)

    async def ask(replay: Replay) -> AsyncGenerator[Part]:
        for part in (SSE, b"data: ", *[b"x" * 1000] * 1000, b"\n\n:0\n", b"\n", DONE):
            yield part

    assert len(asyncio.run(answered(ask))[1]) > 1_000_000 > sum(read) / 4


@pytest.mark.parametrize("left", [False, True])
def test_a_request_waits_while_a_replica_is_left(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    looks, sent = 0, []
    busy = asyncio.Event()

    async def ask(replay: Replay) -> AsyncGenerator[Part]:
        await busy.wait()
        yield JSON
        yield b"{}"

    async def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 30:
            busy.set()
        return left

    async def send(message: Any) -> None:
        sent.append(message)

    stall_seconds = 0.0 if left else 0.005
    asyncio.run(relay(ask, look, stall_seconds, {"type": "http"}, None, send))  # type: ignore[arg-type]
    assert (sent[0]["status"], looks >= 30) == ((200, True) if left else (503, looks >= 30))


def test_a_client_that_leaves_ends_the_call() -> None:
    closed = []

    async def ask(replay: Replay) -> AsyncGenerator[Part]:
        try:
            yield SSE
            yield ONE + b":0\n\n"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def refuse(message: Any) -> None:
        raise OSError("the connection is closed")

    async def run(send: Any, error: type[BaseException]) -> None:
        with pytest.raises(error):
            await asyncio.ensure_future(relay(ask, runs, 60.0, {"type": "http"}, None, send))  # type: ignore[arg-type]

    async def leave(message: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    asyncio.run(run(refuse, OSError))
    asyncio.run(run(leave, asyncio.CancelledError))
    assert len(closed) == 2
