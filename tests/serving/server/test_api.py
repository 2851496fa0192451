"""The HTTP server as clients of the OpenAI API and of vLLM see it."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from api_support import Live, alternating, serving, until

from megakernel import LLM, SamplingParams
from megakernel.serving.bench import ServerClient
from megakernel.serving.bench.client import CPU
from megakernel.serving.engine.engine import Engine, Step
from megakernel.serving.engine.request import Request
from megakernel.serving.server import http as api_http

CONTEXT = 512
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
LIMITS = {"max_context": CONTEXT}


@pytest.fixture
def slow(live: Live) -> Iterator[Live]:
    """Yield the server with steps of at least 20 ms, so that a test can act while a request is in progress."""
    nap = sleeping(0.02)
    live.host.on_step.append(nap)
    yield live
    live.host.on_step.remove(nap)
    until(live.at_rest)


def sleeping(seconds: float) -> Callable[[Step, float], None]:
    return lambda step, wall_s: time.sleep(seconds)


def error_of(data: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(data)["error"]
    return error


@contextmanager
def another(llm: LLM, live: Live, step_s: float = 0, **options: Any) -> Iterator[Live]:
    """Yield a second server for the same `llm`, with its own options and steps of at least `step_s` seconds. It starts
    when the first server has no requests left."""
    until(live.at_rest)
    with serving(llm, **options) as server:
        if step_s:
            server.host.on_step.append(sleeping(step_s))
        yield server


# -- the openai package


def test_chat_stream_by_sdk(client: openai.OpenAI) -> None:
    create = partial(client.chat.completions.create, **HELLO, model="bytes", temperature=0, max_completion_tokens=12)
    whole = create()
    *parts, usage = create(stream=True, stream_options={"include_usage": True})
    assert usage.choices == [] and usage.usage.total_tokens == whole.usage.total_tokens > 12
    first = parts[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert [part.choices[0].finish_reason for part in parts[1:-1]] == [None] * (len(parts) - 2)
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert all(part.usage is None for part in parts)
    assert client.models.retrieve("bytes").id == "bytes"


# -- what is generated


def test_answers_are_those_of_the_engine_alone(live: Live, llm: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 10, "n": 2, "logprobs": 2}
    ids = [[72, 73], [74, 75, 76]]
    body = {**settings, "prompt": ids, "return_token_ids": True}
    answer = live.post(COMPLETIONS, body)
    streamed: dict[int, list[int]] = {}
    for event in live.events(COMPLETIONS, body):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    until(live.at_rest)
    expected = [choice for result in llm.generate(ids, SamplingParams(**settings)) for choice in result.outputs]
    for i, (choice, alone) in enumerate(zip(answer["choices"], expected, strict=True)):
        assert (choice["index"], choice["token_ids"], choice["text"]) == (i, alone.token_ids, alone.text)
        assert (choice["logprobs"]["token_logprobs"], streamed[i]) == (alone.token_logprobs, alone.token_ids)
    cached = answer["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45} and cached == 0


def test_prompts_are_scored_as_lm_eval_asks(live: Live, llm: LLM) -> None:
    """lm_eval sends batches of token ids with echo, logprobs=1 and max_tokens=1. Every token but the first gets a
    log-probability, also the generated token at the end."""
    prompts = [[72, 101, 108], [72, 101]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    answer = live.post(COMPLETIONS, {"model": "bytes", **body})
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        scores = choice["logprobs"]
        (first, none), *pairs = zip(scores["token_logprobs"], scores["top_logprobs"], strict=True)
        assert first is none is None and len(scores["tokens"]) == len(pairs) + 1 == len(prompt) + 1
        assert all(value in top.values() for value, top in pairs)
        assert llm.tokenizer is not None
        assert choice["text"].startswith(llm.tokenizer.decode(prompt))
    scored = live.post(COMPLETIONS, {**body, "max_tokens": 0})
    given, made = ([c["logprobs"]["token_logprobs"] for c in one["choices"]] for one in (scored, answer))
    assert given == [each[:-1] for each in made]
    assert scored["usage"]["completion_tokens"] == 0


def test_chat_scores(live: Live) -> None:
    answer = live.post(CHAT, {**HELLO, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for token in content:
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
        assert len(token["bytes"]) <= 1  # an ordinary token of this model is one byte
    assert live.post(CHAT, {**HELLO, "max_tokens": 1})["choices"][0]["logprobs"] is None


def test_conversations_go_through_the_template(live: Live) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    got = live.post("/tokenize", {"messages": messages})
    assert live.post("/detokenize", {"tokens": got["tokens"]}) == {"prompt": "<system>be brief<user>ab<assistant>"}
    for special in ({}, {"add_special_tokens": False}, {"messages": None}):
        ab = live.post("/tokenize", {"prompt": "ab", **special})
        assert (ab["count"], ab["max_model_len"]) == (2, CONTEXT)
        assert live.post("/detokenize", {"tokens": ab["tokens"]}) == {"prompt": "ab"}
    assert json.loads(live.request("GET", "/tokenizer_info")[2]) == {"bos_token": None, "eos_token": None}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_one_choice(slow: Live, stream: bool, kept: bool) -> None:
    most = 100 + stream + 2 * kept  # `observe` finds the requests of this test by this number
    body = {"prompt": ["x", "y"], "max_tokens": most, "stop": ["bab", "never"], **alternating("ab")}
    body["include_stop_str_in_output"] = kept
    requests: set[Request] = set()

    def observe(step: Step, seconds: float) -> None:
        requests.update(one.request for one in step.sequence if one.request.params.max_tokens == most)

    slow.host.on_step.append(observe)
    if stream:
        events = slow.events(COMPLETIONS, body)
        texts = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in (0, 1)]
        ends = [e["choices"][0] for e in events if e["choices"][0]["finish_reason"]]
        reasons = [choice["finish_reason"] for choice in ends]
    else:
        answer = slow.post(COMPLETIONS, body)
        ends = answer["choices"]
        texts, reasons = ([choice[key] for choice in ends] for key in ("text", "finish_reason"))
        assert answer["usage"]["completion_tokens"] == 8
    assert (texts, reasons) == (["abab" if kept else "a"] * 2, ["stop", "stop"])
    assert [choice["stop_reason"] for choice in ends] == ["bab", "bab"]
    slow.host.on_step.pop()
    until(slow.at_rest)
    # The engine itself ended both choices at the stop string, and did not generate `most` tokens.
    assert [choice.finish_reason for request in requests for choice in request.choices] == ["stop", "stop"]


def test_max_tokens_meet_the_context(live: Live) -> None:
    prompt = [65] * (CONTEXT - 1)
    assert live.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})["usage"]["completion_tokens"] == 1
    assert live.post(COMPLETIONS, {"prompt": prompt})["usage"]["completion_tokens"] == 1
    for body in ({"prompt": prompt, "max_tokens": 2}, {"prompt": [65] * CONTEXT}):
        error = live.post(COMPLETIONS, body, 400)["error"]
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    chat = live.post(CHAT, {**HELLO, "ignore_eos": True})
    assert chat["usage"]["total_tokens"] == CONTEXT


def test_a_clock_that_jumps_changes_only_dates(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "seed": 1}
    expected = live.post(COMPLETIONS, body)["choices"][0]["text"]
    clock = itertools.cycle((0.0, 4e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert live.post(COMPLETIONS, body)["choices"][0]["text"] == expected
    assert "".join(event["choices"][0]["text"] for event in live.events(COMPLETIONS, body)) == expected
    assert live.post(CHAT, {**HELLO, "max_tokens": 1})["usage"]["completion_tokens"] == 1
    assert live.request("GET", "/health")[0] == 200


# -- errors


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        (COMPLETIONS, {}, "prompt", "prompt is required"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "none of them empty, not ''"),
        (COMPLETIONS, {"prompt": [260]}, None, "prompt token 260 is outside the vocabulary of 260"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "only with echo"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9x"}, "max_tokens", "must be a valid integer, not '9x'"),
        (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature", "must be less than or equal to 2, not 2.1"),
        (COMPLETIONS, {"prompt": "a", "top_p": 1e-40}, None, "top_p=1e-40 must be a number from 1.17549e-38 to 1"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "does not rank choices"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"260": 1}}, None, "token 260 is outside the vocabulary"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "each of 1 to 1024 characters"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported: this server's models cannot"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', None, "the body is not JSON: "),
        (COMPLETIONS, b'{"prompt": "', None, "is not JSON: Input data was truncated"),
        (COMPLETIONS, {"prompt": "a", "n": 128, "max_tokens": 500, "logprobs": 20}, None, "have 1344000 log-"),
        (COMPLETIONS, {"prompt": ["a"] * 300, "stop": ["x"] * 60}, "stop", "300 choices with 60 stop strings are too"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"abc": 1}}, "logit_bias.abc", "logit_bias.abc must match pattern"),
        (COMPLETIONS, b'{"prompt": }', None, "the body is not JSON: "),
        (COMPLETIONS, '{"prompt": "é"}'.encode("latin-1"), None, "the body is not JSON: "),
        (COMPLETIONS, b'{"seed": ' + b"9" * 5000 + b"}", None, "is not JSON: Integer value out of range"),
        (COMPLETIONS, b"", None, "the body is required"),
        (CHAT, {"messages": []}, "messages", "must have at least 1 item"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "not 'king'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type", "text"),
        ("/tokenize", {}, "prompt", "prompt is required"),
    ],
)
def test_what_is_wrong_is_a_400(live: Live, path: str, body: Any, param: str | None, message: str) -> None:
    status, headers, data = live.request("POST", path, body)
    error = error_of(data)
    assert status == 400 and headers["content-type"] == "application/json"
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param), error
    assert message in error["message"] and len(error["message"]) < 400
    until(live.at_rest)


@pytest.mark.parametrize(
    "method, path, status, kind",
    [
        ("GET", "/nowhere", 404, "NotFoundError"),
        ("GET", "/v1/models/gpt-5", 404, "NotFoundError"),
        ("POST", f"{COMPLETIONS}/", 404, "NotFoundError"),
        ("GET", COMPLETIONS, 405, "MethodNotAllowedError"),
        ("DELETE", "/health", 405, "MethodNotAllowedError"),
    ],
)
def test_other_errors_have_the_same_shape(live: Live, method: str, path: str, status: int, kind: str) -> None:
    got, headers, data = live.request(method, path)
    error = error_of(data)
    assert (got, error["code"], error["type"]) == (status, status, kind)
    assert error["param"] == ("model" if "gpt" in path else None)
    assert ("allow" in headers) == (status == 405)


def test_a_body_without_its_content_type_is_told(live: Live) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, _, data = live.request("POST", COMPLETIONS, b'{"prompt": "x"}', form)
    assert status == 400 and "with the header Content-Type: application/json" in error_of(data)["message"]


def test_a_fault_inside_is_500(live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(live.service.tokenizer, "encode", Mock(side_effect=ValueError("secret")))
    status, _, data = live.request("POST", COMPLETIONS, {"prompt": "x"})
    assert status == 500 and error_of(data)["type"] == "InternalServerError" and b"secret" not in data
    until(lambda: "secret" in caplog.text)  # the server writes its log after the answer


@pytest.mark.slow
def test_the_openapi_schema_is_true(tmp_path: Path, model: str) -> None:
    """Schemathesis sends requests that the schema allows and others that it forbids. The schema lists each status.

    This is a sample of the full run: `st --config-file tests/support/schemathesis.toml run URL/openapi.json
    --max-examples 1000`. Routes that share most of their fields with the chat's get only requests that are allowed."""
    pytest.importorskip("schemathesis")
    text = (Path(__file__).parents[2] / "support" / "schemathesis.toml").read_text()
    config = tmp_path / "schemathesis.toml"
    alike = rf'(include-path = "({COMPLETIONS}|/v1/responses|/v1/messages\S*)"\n)'
    config.write_text(re.sub(alike, r'\1generation.mode = "positive"\n', text))
    with (
        LLM(model, max_context=96, max_num_seqs=8, max_num_batched_tokens=16, threads=1, backend="null") as llm,
        serving(llm) as live,
    ):
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        flags = ["--max-examples", "1", "--phases", "coverage", "--no-color", "--generation-deterministic"]
        arguments = [*command, *flags, f"{live.url}/openapi.json"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert found and found[1] == found[2] and int(found[1]) > 100, done.stdout
        until(live.at_rest)


# -- limits on requests, and malformed HTTP


def test_limits(llm: LLM, live: Live) -> None:
    with another(llm, live, 0.01, max_body=1000, max_waiting=3) as small:
        for body in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):  # with a declared length, and chunked
            status, _, data = small.request("POST", COMPLETIONS, body)
            assert status == 413
            assert error_of(data)["message"] == "the body is larger than 1000 bytes: send less"
        assert small.request("POST", COMPLETIONS, b"{" + b" " * 999)[0] == 400
        error = small.post(COMPLETIONS, {"prompt": "x", "n": 4}, 400)["error"]
        assert "1 prompts with n=4 exceed the limit of 3 waiting sequences" in error["message"]
        loop = small.host
        with small.send(COMPLETIONS, {**LONG, "n": 3}):
            until(lambda: loop.engine.stats.running == 3)
            with small.send(COMPLETIONS, {**LONG, "n": 3}):  # one sequence runs, two wait
                until(lambda: loop.engine.stats.running == 4)
                with small.send(COMPLETIONS, LONG):
                    until(lambda: loop._waiting() == 3)
                    status, headers, data = small.request("POST", COMPLETIONS, {"prompt": "x"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert "3 sequences are waiting already and at most 3 may" in error_of(data)["message"]
        until(small.at_rest)


def test_a_time_limit(llm: LLM, live: Live) -> None:
    with another(llm, live, 0.02, request_timeout=1.0) as small:
        assert "longer than 1 s: ask for fewer tokens" in small.post(COMPLETIONS, LONG, 503)["error"]["message"]
        until(small.at_rest)
        # The time limit does not apply to a stream whose first event was sent. On a busy machine, that may take longer.
        body = {**LONG, "max_tokens": 60, "stream": True, "return_token_ids": True}
        until(lambda: small.request("POST", COMPLETIONS, body)[2].count(b'"finish_reason":"length"') == 1)


def test_many_short_headers_are_a_large_head(live: Live) -> None:
    head = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + b"X: y\r\n" * 3000 + b"\r\n"
    assert live.said(head).startswith(b"HTTP/1.1 400 ")
    assert live.said(head.replace(b"X: y\r\n" * 2000, b"")).startswith(b"HTTP/1.1 200 ")


def test_a_body_must_arrive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_http, "BODY_SECONDS", 0.05)
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
    assert live.said(sent).startswith(b"HTTP/1.1 408 ")


def test_a_head_must_arrive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.server.config, "timeout_keep_alive", 0.5)
    for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        expected = b"HTTP/1.1 200 OK" if sent.endswith(b"\n") else b""
        until(lambda sent=sent, expected=expected: live.said(sent).partition(b"\r")[0] == expected)  # type: ignore[misc]


def test_an_answer_may_take_longer_than_the_next_head(llm: LLM, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with another(llm, live, 0.01) as slow:
        monkeypatch.setattr(slow.server.config, "timeout_keep_alive", 0.5)
        assert "".join(e["choices"][0]["text"] for e in slow.events(COMPLETIONS, {**LONG, "max_tokens": 60}))
        assert slow.post(COMPLETIONS, {**LONG, "max_tokens": 60})["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize(
    "sent", [b"hello", b"GET http://[ HTTP/1.1\r\nHost: x", b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000]
)
def test_what_is_no_http_has_the_same_shape(live: Live, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    head, _, body = live.said(sent + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and error_of(body)["code"] == 400
    assert caplog.records == []  # a client must not be able to fill the log


# -- clients that disconnect or stop reading


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_queued(slow: Live, stream: bool) -> None:
    owners = slow.host._job_of
    before = [slow.send(COMPLETIONS, LONG) for _ in range(4)]
    until(lambda: slow.host.engine.stats.running == 4)
    running = set(owners)
    sock = slow.send(COMPLETIONS, {**LONG, "stream": stream})
    until(lambda: len(owners) == 5)
    [queued] = set(owners) - running
    sock.close()
    until(lambda: set(owners) == running)
    assert queued.choices[0].finish_reason == "abort" and queued.choices[0].outputs == 0
    for other in before:
        other.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_leaving_while_running(live: Live, stream: bool, phase: str) -> None:
    """The engine pauses after its first step or token until the client has left. The request must then end."""
    held, left = Event(), Event()
    owners = live.host._job_of

    def hold(step: Step, seconds: float) -> None:
        # The last step of an earlier request may be reported after its client has the answer. It does not count.
        if owners and (phase == "prefill" or step.tokens):
            held.set()
            left.wait(60)

    live.host.on_step.append(hold)
    try:
        body = {"prompt": [7] * 500, "max_tokens": 12} if phase == "prefill" else {}
        sock = live.send(COMPLETIONS, {**LONG, **body, "stream": stream})
        assert held.wait(60)
        [request] = owners
        [choice] = request.choices
        assert (choice.outputs == 0) == (phase == "prefill")
        sock.close()
        until(lambda: not live.service.engine._choices)
    finally:
        live.host.on_step.remove(hold)
        left.set()
    until(lambda: request.done)
    assert choice.finish_reason == "abort"
    until(live.at_rest)


def test_a_reader_that_stops_reading_delays_nobody(live: Live) -> None:
    before = live.metric("vllm:prompt_tokens_total")
    with live.send(CHAT, {**HELLO, "max_tokens": 450, "ignore_eos": True, "n": 4, "stream": True, "logprobs": True}):
        until(lambda: live.metric("vllm:prompt_tokens_total") > before)
        live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
        until(lambda: live.host.engine.stats.pages_used == 0)
    until(live.at_rest)


# -- the operator's side


def test_an_observer_that_fails_ends_nothing(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    observe = Mock(side_effect=ValueError("in the observer"))
    live.host.on_step.append(observe)
    assert live.post(COMPLETIONS, {**LONG, "max_tokens": 5})["usage"]["completion_tokens"] == 5
    assert observe.call_count == 1 and "in the observer" in caplog.text


def test_metrics_have_the_names_that_routers_read(live: Live) -> None:
    def values(name: str) -> list[float]:
        lines = live.request("GET", "/metrics")[2].decode().splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))]

    def value(name: str) -> float:
        return sum(values(name))

    names = ["prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total"]
    names += [f"{what}_seconds_count" for what in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")]
    phases = [f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")]
    names += ["request_generation_tokens_sum", *(f"{phase}_count" for phase in phases)]
    until(live.at_rest)  # a request that a client of an earlier test has left may count late
    before = [value(name) for name in names]
    live.post(COMPLETIONS, {"prompt": ["abc", "d"], "max_tokens": 5, "ignore_eos": True})
    assert [value(name) - b for name, b in zip(names, before, strict=True)] == [4, 10, 2, 0, 2, 8, 2, 10, 2, 2, 2, 2]
    until(lambda: value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0)
    assert value("cache_config_info") == 1
    queue, prefill, decode, inference = (value(f"{phase}_sum") for phase in phases)
    assert min(queue, prefill, decode) > 0 and inference == pytest.approx(prefill + decode)
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(queue + inference)
    lengths = values("request_generation_tokens_bucket")
    assert lengths == sorted(lengths) and lengths[-1] == value("request_generation_tokens_count")


def test_the_server_tells_its_cpu_time(live: Live) -> None:
    def spent() -> dict[str, float]:
        found = asyncio.run(ServerClient(live.url).metrics())
        return {name.removeprefix(CPU): value for name, value in found.items() if name.startswith(CPU)}

    before = spent()
    live.post(COMPLETIONS, {**LONG, "max_tokens": 50})
    after = spent()
    assert set(before) == set(after) == {'engine"}', 'frontends"}'}
    assert all(after[kind] > before[kind] > 0 for kind in after)


def test_health_tells_of_a_stall(llm: LLM, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the first step after a pause never ends."""
    assert live.request("GET", "/health")[0::2] == (200, b"")
    with another(llm, live, stall_timeout=0.2) as server:
        step, go_on = llm.engine.step, Event()
        monkeypatch.setattr(llm.engine, "step", lambda **more: (go_on.wait(60), step(**more))[1])
        with server.send(COMPLETIONS, {"prompt": "x", "max_tokens": 3}):
            until(lambda: b"no step has ended for" in server.request("GET", "/health")[2])
        go_on.set()
        until(lambda: server.request("GET", "/health")[0] == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_says_so(
    llm: LLM, live: Live, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another(llm, live) as server:
        steps = iter(range(5))

        def step(**options: Any) -> Step:
            if next(steps, None) is None:
                raise RuntimeError("secret")
            return Engine.step(llm.engine, **options)

        monkeypatch.setattr(llm.engine, "step", step)
        status, _, data = server.request("POST", COMPLETIONS, {**LONG, "stream": stream})
        assert status == (200 if stream else 503)
        error = error_of(data.removesuffix(b"\n\ndata: [DONE]\n\n").rpartition(b"data: ")[2])
        assert error["code"] == 503 and "the engine has stopped, restart the server" in error["message"]
        assert "secret" not in error["message"] and "secret" in caplog.text
        assert server.request("GET", "/health")[0] == 503
        assert server.request("POST", COMPLETIONS, {"prompt": "x"})[0] == 503
    for request in [*llm.engine._batch.running, *llm.engine._batch.waiting]:
        llm.engine.abort(request.request)
    assert llm.engine.idle
