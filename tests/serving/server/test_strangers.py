"""Requests of strangers that once kept other clients waiting, or got a wrong answer."""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from api_support import Live, serving, until, user
from serve_process import asleep, children, started, state

from megakernel import LLM
from megakernel.cli import serve
from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.model.tokenizer import Limit, TooLong
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.server import client, scores, writer
from megakernel.serving.server.client import Answers
from megakernel.serving.server.frontend import listen, listen_on_path
from megakernel.serving.server.routes.chat import ChatRequest, _ChatWriter
from megakernel.serving.server.routes.completions import CompletionRequest, _CompletionWriter
from megakernel.serving.server.writer import WAITING, EventStream, Writer, in_parts
from megakernel.serving.text.codec import Codec, Token, Transcript

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "filler"), [(CHAT, WAITING), (RESPONSES, WAITING), (MESSAGES, b'event: ping\ndata: {"type":"ping"}\n\n')]
)
def test_a_stream_begins_before_tokens(null: Live, monkeypatch: pytest.MonkeyPatch, path: str, filler: bytes) -> None:
    """The status comes when the engine has accepted the request. While there is no event, comments keep proxies from
    closing the connection."""
    monkeypatch.setattr(writer, "SILENCE", 0.05)
    step, go_on = null.host.engine.step, Event()
    monkeypatch.setattr(null.host.engine, "step", lambda **more: (go_on.wait(30), step(**more))[1])
    body = {"input": "x", "max_output_tokens": 2} if path == RESPONSES else {**user("x"), "max_tokens": 2}
    with null.send(path, body | {"stream": True}) as sock:
        seen = b""
        while seen.count(filler) < 3:
            seen += sock.recv(1000)
        assert seen.startswith(b"HTTP/1.1 200 OK") and b"data: {" not in seen.replace(filler, b"")
        go_on.set()
        while b"finish_reason" not in seen and b"_stop" not in seen and b"complete" not in seen:
            seen += sock.recv(1000)


async def listed(parts: Any) -> list[bytes]:
    return [part async for part in parts]


PROMPT = [65] * 3000


def chat_writer(answers: Answers, tokenizer: Any, top: int, **more: Any) -> Writer:
    body = ChatRequest(**user("x"), logprobs=True, top_logprobs=top, **more)
    return _ChatWriter("m", body, answers, lambda: None, tokenizer)


def completion_writer(answers: Answers, tokenizer: Any, top: int, **more: Any) -> Writer:
    body = CompletionRequest(prompt=PROMPT, logprobs=top, echo=True, **more)
    return _CompletionWriter(["A" * 3000], "m", body, answers, lambda: None, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [chat_writer, completion_writer])
@pytest.mark.parametrize(("n", "tokens", "top", "stops"), [(16, 100, 20, 0), (1, 3000, 20, 0), (16, 100, 0, 64)])
def test_long_answers_leave_other_clients_their_turn(
    model: str, monkeypatch: pytest.MonkeyPatch, make: Any, stream: bool, n: int, tokens: int, top: int, stops: int
) -> None:
    """Between two turns of other tasks on the event loop, the work for one answer is bounded, and so are the bytes that
    are written. Work is counted in tokens that are appended, and in texts of tokens that are shown."""
    work: Counter[str] = Counter()
    add, text = Transcript.add, scores.token_text

    def added(self: Transcript, token: Token) -> str:
        work["units"] += 1 + len(self._matchers)
        return add(self, token)

    def shown(*given: Any) -> str:
        work["units"] += 1
        return text(*given)

    monkeypatch.setattr(Transcript, "add", added)
    monkeypatch.setattr(scores, "token_text", shown)
    stop = ["ab" * 16 + chr(0x100 + i) for i in range(stops)]
    tokenizer, prompt = load_tokenizer(model), np.array(PROMPT, np.int32)
    params = SamplingParams(n=n, max_tokens=tokens, stop=stop, logprobs=top, prompt_logprobs=top)

    async def run() -> Any:
        transcripts = Codec("m", tokenizer).transcripts(PROMPT, params)
        answers = Answers(Mock(metrics=None), [prompt], params, transcripts)
        best = {65 + i: -1.0 - i for i in range(top)}
        answers.scores[0] = [-1.0] * 2999, [best] * 2999
        for index in range(n * tokens):
            answers.put(Token(index % n, 65, -1.0, best, "length" if index >= n * (tokens - 1) else None, 1.0))
        one = make(answers, tokenizer, top, n=n, stop=stop, prompt_logprobs=None if stream else top)
        writing = asyncio.ensure_future(listed(one.chunks()) if stream else one.whole())
        while not writing.done():
            work["most"] = max(work["most"], work.pop("units", 0))
            await asyncio.sleep(0)
        return writing.result()

    parts = asyncio.run(run())
    said = b"".join(parts)
    assert stream or sum(len(part) for part in parts if isinstance(part, bytes)) <= 10_000 * n  # written in one turn
    assert b"".join(in_parts(parts)) == said and max(map(len, in_parts(parts))) <= writer._LARGE
    work["most"] = max(work["most"], work["units"])
    assert 0 < work["most"] <= 2.5 * client.MOST_WORK
    assert said.count(json.dumps(tokenizer.decode([65]), ensure_ascii=False).encode()) > n * tokens or top == 0


def test_no_comment_comes_into_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may stop reading amid a large event for longer than the silence after which comments are sent."""
    monkeypatch.setattr(writer, "SILENCE", 0.01)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0.1)
        sent.append(message["body"])

    async def chunks() -> AsyncIterator[bytes]:
        for part in (b"data: 1", b"2", b"3\n\n"):
            yield part

    stream = EventStream(Mock(chunks=chunks, last=b"", filler=WAITING), lambda work: work)
    asyncio.run(stream._send({}, send))
    assert b"data: 123\n\n" in b"".join(sent)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {}),
        (EMBEDDINGS, {"truncate_prompt_tokens": -1}),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "truncate_prompt_tokens": 256}),
        ("/tokenize", {}),
    ],
)
def test_nothing_generated_needs_no_room(null: Live, path: str, body: dict[str, Any]) -> None:
    """An input may fill the context if no answer follows it."""
    name = "input" if path == EMBEDDINGS else "prompt"
    got = null.post(path, body | {name: "a" * 256})
    assert got.get("count") or got["usage"]["prompt_tokens"] == 256
    if "truncate_prompt_tokens" in body:  # wants the end of a text of any length
        assert null.post(path, body | {name: "a" * 3000})["usage"]["prompt_tokens"] == 256
    else:
        told = null.post(path, body | {name: "a" * 257}, 400)["error"]["message"]
        assert "maximum context length is 256 tokens" in told and "answer" not in told


def test_tokenize_counts_what_usage_counts(model: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said: list[Any] = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    said += [{"role": "assistant", "refusal": "no"}, {"role": "user", "content": "x"}]
    plain = [{"role": "assistant", "content": "no"}] * 2 + said[2:]
    with LLM(model, backend="null", max_context=2048, threads=1) as llm, serving(llm) as live:
        bodies = [{"messages": plain}, {"messages": said}, {"messages": said, "tools": [tool]}]
        counts = [live.post("/tokenize", body)["count"] for body in bodies]
        used = [live.post(CHAT, body | {"max_tokens": 1})["usage"]["prompt_tokens"] for body in bodies]
    assert counts == used and counts[0] == counts[1] < counts[2]


def test_a_prompt_that_fills_the_context_is_computed_as_any_other(model: str) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    found = []
    for context in (64, 128):
        with LLM(model, max_context=context, max_num_seqs=2, max_num_batched_tokens=32, threads=1) as llm:
            [made] = llm.generate([[(7 * i) % 250 for i in range(64)]], params)
            found.append((made.prompt_logprobs, made.outputs[0].token_ids, made.outputs[0].finish_reason))
    assert found[0] == found[1] and len(found[0][0] or ()) == 64


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("text", ["ab" * 10_000_000, " " * 10_000_000, "\N{WATERMELON}" * 5_000_000])
def test_a_long_text_is_encoded_in_part(model: str, monkeypatch: pytest.MonkeyPatch, text: str, last: bool) -> None:
    tokenizer, size = load_tokenizer(model), 0
    assert tokenizer is not None
    whole, encode = tokenizer.encode(text[-1000:], add_special=False)[-600:], tokenizer._backend.encode_batch_fast

    class Counted:
        def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
            nonlocal size
            size += len(texts[0])
            return encode(texts, **more)

    monkeypatch.setattr(tokenizer, "_backend", Counted())
    if last:
        assert tokenizer.encode(text, limit=Limit(600, last=True))[-600:] == whole
    else:
        with pytest.raises(TooLong, match="more than 600 tokens"):
            tokenizer.encode(text, limit=Limit(600))
    assert size < 200_000


@pytest.mark.parametrize(
    ("kind", "number"), [("template", signal.SIGKILL), ("template", signal.SIGSTOP), ("grammar", signal.SIGTERM)]
)
def test_a_helper_that_dies_is_replaced(null: Live, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    body = user("x") | {"max_tokens": 1}
    assert null.post(CHAT, body | {"structured_outputs": {"regex": "a"}})["choices"]
    templates, grammars = null.service.tokenizer._templates, null.host._grammars  # type: ignore[union-attr]
    limited: Any = templates["default"]._process if kind == "template" else grammars._checker
    monkeypatch.setattr("megakernel.model.limited._PATIENCE", 4)
    os.kill(limited._process.pid, number)
    assert null.post(CHAT, body | {"structured_outputs": {"regex": "b"}})["choices"]
    monkeypatch.setattr(limited, "_command", ["sh", "-c", "printf {; kill -9 $$"])
    os.kill(limited._process.pid, signal.SIGKILL)
    status, headers, data = null.request("POST", CHAT, body | {"structured_outputs": {"regex": "c"}})
    assert (status, headers["retry-after"]) == (503, "1") and b"two helper processes ended" in data


def test_an_address_is_taken_by_the_first_server(tmp_path: Path) -> None:
    """Two servers that start together cannot both get one address, and none removes the other's socket."""
    with listen("127.0.0.1", 0) as first, pytest.raises(MegakernelError, match="Address already in use"):
        listen("127.0.0.1", first.getsockname()[1])
    path = tmp_path / "socket"
    with serve._listening({"uds": str(path)}):
        with pytest.raises(MegakernelError, match="another server listens there"):
            listen_on_path(str(path))
        path.unlink()
        with listen_on_path(str(path)):  # the server that replaces this one
            pass
    assert path.exists()


@pytest.mark.parametrize("signals", [1, 2])
def test_nothing_outlives_a_server(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signals: int) -> None:
    """A frontend that is stopped is killed after --shutdown-timeout, and no folder remains."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    brief = "from megakernel.serving.server import frontends; frontends._GRACE = 0.1"
    patience = "0.1" if signals == 1 else "60"
    with started("--json", "--model", model, "--shutdown-timeout", patience, first=brief) as server:
        assert server.stdout is not None and server.stdout.readline() and list(tmp_path.glob("megakernel-*"))
        [frontend] = children(server.pid)
        with asleep(frontend):
            server.terminate()
            if signals == 2:
                assert server.stderr is not None and "SIGTERM" in server.stderr.readline()
                server.terminate()
            assert server.wait(timeout=30) == (128 + signal.SIGTERM if signals == 2 else 0)
        until(lambda: state(frontend) in "ZX")
        assert not list(tmp_path.glob("megakernel-*"))


def test_a_server_that_is_ready_is_warm(model: str) -> None:
    with LLM(model, backend="null", max_context=256, threads=1) as llm:
        llm.warm(60)
        known = len(llm.engine.programs._cache)
        for size in (1, 9, 200):
            llm.generate([[65] * size], SamplingParams(max_tokens=2))
        assert len(llm.engine.programs._cache) == known > 1
    with started("--model", model, first="from megakernel import LLM; LLM.warm = lambda *_: exit('warms')") as server:
        out, err = server.communicate(timeout=60)
    assert not out and "warms" in err


def test_the_log_has_a_line_for_each_request(null: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Its times and tokens tell an operator what a client saw. Requests of clients that leave are counted too."""
    caplog.set_level("INFO", log := "megakernel.serving.server.http")
    null.request("POST", COMPLETIONS, {"prompt": "abc", "max_tokens": 2, "n": 2}, {"X-Request-Id": "mine"})
    null.request("POST", COMPLETIONS, {"prompt": ""})
    null.host.on_step.append(lambda *_: sleep(0.02))
    with null.send(COMPLETIONS, {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
    until(lambda: "499" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name == log]
    time = r"\d+\.\d{3} s"
    told = rf"mine POST '/v1/completions': status 200, 3 prompt tokens, 4 generated, first after {time}, {time} in all"
    assert re.fullmatch(told, lines[0]) and "status 400, 0 prompt tokens" in lines[1] and "status 499, 1" in lines[2]
    assert null.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
