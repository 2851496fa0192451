"""One client cannot block the others, neither in the tokeniser threads nor in the queue for the engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from api_support import Live
from engine_support import fake_engine

from megakernel import SamplingParams, StructuredOutputsParams
from megakernel.serving.engine.grammars import Grammars
from megakernel.serving.server.loop import EngineLoop
from megakernel.serving.server.messages import Submit
from megakernel.serving.server.service import CLIENT, ThreadTurns


def ask(turns: ThreadTurns, client: str, work: Callable[[], Any]) -> asyncio.Task[Any]:
    context = copy_context()
    context.run(CLIENT.set, client)
    return asyncio.get_running_loop().create_task(turns.run(work), context=context)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_take_turns() -> None:

    async def run() -> list[str]:
        turns, order, gate = ThreadTurns(1), list[str](), threading.Event()
        first = ask(turns, "greedy", gate.wait)
        await settle()
        work = [("greedy", i) for i in range(20)] + [("a", 0), ("b", 0)]
        tasks = [ask(turns, client, lambda name=f"{client} {i}": order.append(name)) for client, i in work]
        await settle()
        gate.set()
        await asyncio.gather(first, *tasks)
        return order

    order = asyncio.run(run())
    assert order == ["a 0", "b 0", *(f"greedy {i}" for i in range(20))]


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_who_leaves_frees_the_thread(when: str) -> None:
    """But only when its work has ended. One client leaves a thread for the others."""

    async def run() -> None:
        turns, gate = ThreadTurns(2), threading.Event()
        tasks = [ask(turns, "a", gate.wait), ask(turns, "a", lambda: None)]
        await settle()
        tasks[when == "waiting"].cancel()
        await settle()
        third, other = ask(turns, "a", lambda: 7), ask(turns, "b", lambda: 8)
        assert await asyncio.wait_for(other, 30) == 8 and not third.done()
        gate.set()
        assert await asyncio.wait_for(third, 30) == 7

    asyncio.run(run())


def test_a_server_encodes_in_turn_by_address(null: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose texts take long to tokenise does not block /tokenize for a client at another address."""
    gate, begun = threading.Event(), threading.Semaphore(0)
    assert null.service.tokenizer is not None
    encode = null.service.tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        if text == "slow":
            begun.release()
            gate.wait()
        return encode(text, **options)

    monkeypatch.setattr(null.service.tokenizer, "encode", slow)
    greedy = [null.send("/tokenize", {"prompt": "slow"}) for _ in range(9)]
    for _ in range(3):
        assert begun.acquire(timeout=30)
    try:
        assert null.request("POST", "/tokenize", {"prompt": "quick"}, source="127.0.0.9")[0] == 200
    finally:
        gate.set()
    for sock in greedy:
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        sock.close()


def test_the_engine_admits_clients_in_turn() -> None:
    engine, _ = fake_engine(max_seqs=1)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = [engine.add([1], params, client="greedy") for _ in range(10)]
    other = engine.add([1], params, client="other")
    order = [choice for step in engine.run() for choice in step.tokens.choice.tolist()]
    assert order.index(other.first) <= 1
    assert [i for i in order if i != other.first] == [request.first for request in requests]


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    engine, _ = fake_engine(max_seqs=1)
    llm = Mock(engine=engine, grammars=Grammars(None, engine.dims.model.vocab, frozenset()))
    made = EngineLoop(llm, source="", frontends=1, max_waiting=3)
    yield made
    made._context.destroy(0)


def submit(first: int, client: str, **limits: Any) -> Submit:
    params = SamplingParams(max_tokens=4, **limits)
    return Submit(first, [np.array([1], np.int32).tobytes()], params, client)


def test_one_client_does_not_fill_the_queue(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(loop, "_socket", Mock(send_multipart=lambda parts: sent.append(parts[1])))

    def queued(first: int, client: str) -> bool:
        before = len(sent)
        loop._handle(b"frontend", submit(first, client))
        return b"Accepted" in b"".join(sent[before:])

    assert [queued(i, "greedy") for i in range(4)] == [True, True, True, False]
    assert [queued(10 + i, "other") for i in range(4)] == [True, True, True, False]
    assert not queued(20, "third") and b"6 sequences are waiting already and at most 6 may" in sent[-1]
    loop._abort(b"frontend", 0)
    assert queued(30, "greedy") and not queued(31, "greedy")
    for first in (1, 2, 10, 11, 12, 30):
        loop._abort(b"frontend", first)
    assert loop.engine.idle and not loop._open_of and queued(40, "greedy")


def test_grammars_are_compiled_in_turn(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose grammars wait to be compiled delays another client by one grammar."""
    started: list[Callable[[Any], None]] = []
    order: list[int] = []

    def run_beside(kind: str, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        order.append(work())
        started.append(then)

    monkeypatch.setattr(loop, "_max_waiting", 99)
    monkeypatch.setattr(loop, "_run_beside", run_beside)
    monkeypatch.setattr(loop._grammars, "get", lambda params: int(params.structured_outputs.regex))
    monkeypatch.setattr(loop, "_queue", lambda key, asked, constraint: None)
    for first in range(8):
        form = StructuredOutputsParams(regex=f"{first}")
        loop._submit(b"frontend", submit(first, "greedy" if first < 6 else "other", structured_outputs=form))
    assert order == [0]  # one at a time
    loop._abort(b"frontend", 2)
    for then in started:
        then(None)
    assert order == [0, 1, 6, 7, 3, 4, 5]  # 2 was aborted before its turn
    assert not loop._compiling and not loop._uncompiled and not loop._compiles


def test_an_engine_that_fails_while_the_server_ends_holds_nothing_up(loop: EngineLoop) -> None:
    loop.engine.step = Mock(side_effect=ValueError("in the last step"))  # type: ignore[method-assign]
    loop._handle(b"frontend", submit(0, "a"))
    loop._in_engine(loop._end)
    loop.start()
    loop._thread.join(60)
    assert not loop._thread.is_alive()
