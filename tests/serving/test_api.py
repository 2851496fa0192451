"""The HTTP server as clients of the OpenAI API and of vLLM see it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_support import Live, serving, until
from model_helpers import byte_model

from megakernel import LLM, SamplingParams
from megakernel.serving.api import http as api_http
from megakernel.serving.engine import Engine, Step
from megakernel.serving.request import Request

CONTEXT = 512
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    byte_model(folder, gain=0.01)
    with LLM(str(folder), max_context=CONTEXT, max_seqs=4, step_tokens=32, threads=1) as made:
        made.model = "bytes"
        yield made


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    with serving(llm) as server:
        yield server


@pytest.fixture
def slow(live: Live) -> Iterator[Live]:
    """The server with steps of at least 5 ms, so that a request can be met half-way."""
    nap = lambda step, seconds: time.sleep(0.005)  # noqa: E731
    live.service.engine.on_step.append(nap)
    yield live
    live.service.engine.on_step.remove(nap)
    until(live.at_rest)


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def byte_ids(llm: LLM, text: bytes) -> list[int]:
    assert llm.tokenizer is not None
    known = {llm.tokenizer.token_bytes(i): i for i in range(256)}
    return [known[bytes([b])] for b in text]


def alternating(llm: LLM, text: bytes) -> dict[str, Any]:
    """Parameters under which the two bytes of `text` come in turn, whatever the weights are."""
    first, second = byte_ids(llm, text)
    return {"temperature": 0, "logit_bias": {str(first): 100, str(second): 99}, "frequency_penalty": 2.0}


# -- the openai package


def test_completion_by_sdk(client: openai.OpenAI, live: Live) -> None:
    expected = live.post(COMPLETIONS, {"prompt": "hello", "temperature": 0, "max_tokens": 8, "return_token_ids": True})
    got = client.completions.create(model="bytes", prompt="hello", temperature=0, max_tokens=8)
    assert got.choices[0].text == expected["choices"][0]["text"]
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (5, 8, 13)


def test_chat_stream_by_sdk(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "hi"}], temperature=0, max_completion_tokens=12
    )
    chunks = list(
        client.chat.completions.create(
            model="bytes",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, usage = chunks
    assert usage.choices == [] and usage.usage == whole.usage
    first = parts[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert [part.choices[0].finish_reason for part in parts[1:-1]] == [None] * (len(parts) - 2)
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert all(part.usage is None for part in parts)


def test_errors_by_sdk(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here: known are bytes"):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="bytes", prompt="x", temperature=3)
    assert e.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    assert [model.id for model in client.models.list()] == [client.models.retrieve("bytes").id] == ["bytes"]


# -- what is generated


def test_answers_are_those_of_the_engine_alone(live: Live, llm: LLM) -> None:
    """The same request offline and over HTTP, in every form of prompt, streamed and not."""
    settings = {"temperature": 0.8, "seed": 7, "max_tokens": 10, "n": 2, "logprobs": 2}
    ids = [[72, 73], [74, 75, 76]]
    body = {**settings, "prompt": ids, "return_token_ids": True}
    answer = live.post(COMPLETIONS, body)
    streamed: dict[int, list[int]] = {}
    for event in live.events(COMPLETIONS, body):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    until(live.at_rest)
    offline = llm.generate(ids, SamplingParams(temperature=0.8, seed=7, max_tokens=10, n=2, logprobs=2))
    expected = [choice for result in offline for choice in result.choices]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [choice.token_ids for choice in expected]
    assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in expected]
    assert [c["logprobs"]["token_logprobs"] for c in answer["choices"]] == [c.logprobs for c in expected]
    assert [streamed[i] for i in range(4)] == [choice.token_ids for choice in expected]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45}


@pytest.mark.parametrize("prompt, tokens", [("ab", 2), (["ab", "c"], 3), ([97, 98], 2), ([[97], [98, 99]], 3)])
def test_forms_of_a_prompt(live: Live, prompt: Any, tokens: int) -> None:
    answer = live.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(answer["choices"]) == (len(prompt) if several else 1)
    assert answer["usage"]["prompt_tokens"] == tokens


def test_prompts_are_scored_as_lm_eval_asks(live: Live, llm: LLM) -> None:
    """echo, logprobs=1 and one token, for batched ids: the first has no score, the last is the generated one."""
    prompts = [[72, 101, 108], [72, 101]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    answer = live.post(COMPLETIONS, {"model": "bytes", **body})
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(prompt) + 1
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        for value, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
            assert value in top.values() and value <= max(top.values())
        assert llm.tokenizer is not None
        assert choice["text"].startswith(llm.tokenizer.decode(prompt))
    scored = live.post(COMPLETIONS, {**body, "max_tokens": 0})
    assert [c["logprobs"]["token_logprobs"] for c in scored["choices"]] == [
        c["logprobs"]["token_logprobs"][:-1] for c in answer["choices"]
    ]
    assert scored["usage"]["completion_tokens"] == 0


def test_echo_and_scores_stream(live: Live) -> None:
    body = {"prompt": "hello", "echo": True, "logprobs": 0, "n": 2, "max_tokens": 4, "seed": 3}
    whole = live.post(COMPLETIONS, body)
    for choice in whole["choices"]:
        parts = [e["choices"][0] for e in live.events(COMPLETIONS, body) if e["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][name]] == choice["logprobs"][name]


def test_chat_scores(live: Live) -> None:
    answer = live.post(CHAT, {**HELLO, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for token in content:
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
        assert len(token["bytes"]) <= 1  # of a byte, also where it is no character
    assert live.post(CHAT, {**HELLO, "max_tokens": 1})["choices"][0]["logprobs"] is None


def test_conversations_go_through_the_template(live: Live) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    got = live.post("/tokenize", {"messages": messages})
    assert live.post("/detokenize", {"tokens": got["tokens"]}) == {"prompt": "<system>be brief<user>ab<assistant>"}
    ab = live.post("/tokenize", {"prompt": "ab"})
    assert (ab["count"], ab["max_model_len"]) == (2, CONTEXT)
    assert live.post("/detokenize", {"tokens": ab["tokens"]}) == {"prompt": "ab"}


def test_a_character_is_never_cut(live: Live, llm: LLM) -> None:
    body = {"prompt": "x", "max_tokens": 4, **alternating(llm, "é".encode())}
    texts = [event["choices"][0]["text"] for event in live.events(COMPLETIONS, body)]
    assert "".join(texts) == "éé"
    assert live.post(COMPLETIONS, {**body, "max_tokens": 3})["choices"][0]["text"] == "é\ufffd"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_one_choice(slow: Live, llm: LLM, stream: bool) -> None:
    body = {"prompt": ["x", "y"], "max_tokens": 100, "stop": ["bab", "never"], **alternating(llm, b"ab")}
    requests: set[Request] = set()
    slow.service.engine.on_step.append(lambda step, seconds: requests.update(token.request for token in step.tokens))
    if stream:
        events = slow.events(COMPLETIONS, body)
        texts = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in (0, 1)]
        reasons = [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]]
    else:
        answer = slow.post(COMPLETIONS, body)
        texts = [choice["text"] for choice in answer["choices"]]
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert answer["usage"]["completion_tokens"] == 8
    assert (texts, reasons) == (["a", "a"], ["stop", "stop"])
    slow.service.engine.on_step.pop()
    until(slow.at_rest)
    # The engine was told, and generated no further.
    assert [choice.finish_reason for request in requests for choice in request.choices] == ["stop", "stop"]


def test_null_and_unknown_fields_are_ignored(live: Live) -> None:
    nulls = dict.fromkeys(("max_tokens", "n", "stop", "stream", "seed", "logit_bias", "best_of", "suffix", "model"))
    live.post(COMPLETIONS, {"prompt": "x", **nulls, "use_beam_search": False, "guided_json": None, "user": "me"})
    nulls = dict.fromkeys(("tools", "response_format", "logprobs", "top_logprobs", "max_tokens", "temperature"))
    live.post(CHAT, {**HELLO, **nulls, "max_completion_tokens": 1, "parallel_tool_calls": True})


def test_max_tokens_meet_the_context(live: Live) -> None:
    """One token fits after a prompt of context - 1; what is not asked for is cut to what fits."""
    prompt = [65] * (CONTEXT - 1)
    assert live.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})["usage"]["completion_tokens"] == 1
    assert live.post(COMPLETIONS, {"prompt": prompt})["usage"]["completion_tokens"] == 1
    for body in ({"prompt": prompt, "max_tokens": 2}, {"prompt": [65] * CONTEXT}):
        error = live.post(COMPLETIONS, body, 400)["error"]
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    chat = live.post(CHAT, {**HELLO, "ignore_eos": True})
    assert chat["usage"]["total_tokens"] == CONTEXT


# -- errors


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        (COMPLETIONS, {}, "prompt", "prompt is required"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "none of them empty, not ''"),
        (COMPLETIONS, {"prompt": []}, "prompt", "none of them empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "list of up to 2048 texts or lists of token ids"),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt", "up to 2048"),
        (COMPLETIONS, {"prompt": [260]}, None, "prompt token 260 is outside the vocabulary of 260"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "only with echo"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, "max_tokens", "valid integer, not '9'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer, not True"),
        (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, "temperature", "less than or equal to 2, not 2.1"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
        (COMPLETIONS, {"prompt": "a", "n": 129}, "n", "less than or equal to 128"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "must equal n"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"260": 1}}, None, "token 260 is outside the vocabulary"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, None, "must not exceed max_tokens"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "need stream=true"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "each of 1 to 1024 characters"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "at most 0 characters"),
        (COMPLETIONS, {"prompt": "a", "top_k": "y" * 500}, "top_k", "(502 characters)"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature", "finite number"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', "prompt", "must be text"),
        (COMPLETIONS, b'{"prompt": ', None, "the body is not JSON: Expecting value at character 11"),
        (COMPLETIONS, b"\xff\xfe", None, "body"),
        (COMPLETIONS, b"", None, "the body is required"),
        (COMPLETIONS, b"[" * 100_000, None, "body"),
        (COMPLETIONS, [1, 2], None, "valid dictionary"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "not 'king'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "text"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        (CHAT, {**HELLO, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {**HELLO, "tools": [{}]}, "tools", "at most 0 items"),
        (CHAT, {**HELLO, "response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ("/tokenize", {}, None, "give prompt, a text, or messages"),
        ("/detokenize", {"tokens": [260]}, "tokens", "outside the vocabulary"),
    ],
)
def test_what_is_wrong_is_a_400(live: Live, path: str, body: Any, param: str | None, message: str) -> None:
    status, headers, data = live.request("POST", path, body)
    error = json.loads(data)["error"]
    assert status == 400 and headers["content-type"] == "application/json"
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param), error
    assert message in error["message"] and len(error["message"]) < 400
    assert live.at_rest()


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
    error = json.loads(data)["error"]
    assert (got, error["code"], error["type"], error["param"]) == (
        status,
        status,
        kind,
        "model" if "gpt" in path else None,
    )
    assert ("allow" in headers) == (status == 405)


def test_a_body_without_its_content_type_is_told(live: Live) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, _, data = live.request("POST", COMPLETIONS, b'{"prompt": "x"}', form)
    assert status == 400 and "with the header Content-Type: application/json" in json.loads(data)["error"]["message"]


def test_special_tokens_are_told(live: Live) -> None:
    assert json.loads(live.request("GET", "/tokenizer_info")[2]) == {"bos_token": None, "eos_token": None}
    assert live.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})["count"] == 2


def test_a_failure_inside_is_a_500_without_its_cause(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> list[int]:
        raise ValueError("secret")

    monkeypatch.setattr(live.service.llm, "encode", fail)
    status, _, data = live.request("POST", COMPLETIONS, {"prompt": "x"})
    assert status == 500 and json.loads(data)["error"]["type"] == "InternalServerError" and b"secret" not in data


# -- who may ask, and how much


def test_keys_guard_v1_alone(llm: LLM, live: Live) -> None:
    until(live.at_rest)
    with serving(llm, keys=["sésame", "second"], names=["a", "b"]) as guarded:
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic second"},
            {"Authorization": "second"},
        ):
            status, headers, data = guarded.request("GET", "/v1/models", headers=header)
            assert status == 401 and headers["www-authenticate"] == "Bearer"
            assert json.loads(data)["error"]["type"] == "AuthenticationError"
        # The key is asked for before the body is read.
        assert guarded.request("POST", COMPLETIONS, b"{")[0] == 401
        assert guarded.request("GET", "/health")[0] == guarded.request("GET", "/metrics")[0] == 200
        status, _, data = guarded.request("GET", "/v1/models", headers={"Authorization": "bearer second"})
        assert status == 200 and [model["id"] for model in json.loads(data)["data"]] == ["a", "b"]
        sdk = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="second", max_retries=0)
        assert sdk.completions.create(model="b", prompt="x", max_tokens=1).model == "b"
        schema = json.loads(guarded.request("GET", "/openapi.json")[2])
        assert schema["paths"][COMPLETIONS]["post"]["security"] and "security" not in schema["paths"]["/health"]["get"]


def test_limits(llm: LLM, live: Live) -> None:
    until(live.at_rest)
    with serving(llm, max_body=1000, max_waiting=3) as small:
        for body in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):  # its length declared, and in chunks
            status, headers, data = small.request("POST", COMPLETIONS, body)
            assert (status, headers["connection"]) == (413, "close")
            assert json.loads(data)["error"]["message"] == "the body is larger than 1000 bytes: send less"
        assert small.request("POST", COMPLETIONS, b"{" + b" " * 999)[0] == 400
        error = small.post(COMPLETIONS, {"prompt": "x", "n": 4}, 400)["error"]
        assert "1 prompts with n=4 are more than the 3 that may wait" in error["message"]
        small.service.engine.on_step.append(lambda step, seconds: time.sleep(0.01))
        with small.send(COMPLETIONS, {**LONG, "n": 3}):
            until(lambda: small.service.engine.stats.running == 3)
            with small.send(COMPLETIONS, {**LONG, "n": 3}):  # one of them runs too
                until(lambda: small.service.engine.stats.running == 4)
                with small.send(COMPLETIONS, LONG):
                    until(lambda: small.service.engine.waiting == 3)
                    status, headers, data = small.request("POST", COMPLETIONS, {"prompt": "x"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert "3 sequences wait already, of at most 3" in json.loads(data)["error"]["message"]
        until(small.at_rest)


def test_a_time_limit(llm: LLM, live: Live) -> None:
    until(live.at_rest)
    with serving(llm, request_timeout=0.3) as small:
        small.service.engine.on_step.append(lambda step, seconds: time.sleep(0.01))
        status, _, data = small.request("POST", COMPLETIONS, LONG)
        assert status == 503 and "no complete answer within 0.3 s" in json.loads(data)["error"]["message"]
        until(small.at_rest)
        # A stream that has begun may take its time.
        assert len(small.events(COMPLETIONS, {**LONG, "max_tokens": 60})) == 60


def test_a_body_must_arrive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_http, "BODY_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert sock.recv(10_000).startswith(b"HTTP/1.1 408 ")


def test_a_head_must_arrive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.server.config, "timeout_keep_alive", 0.1)
    for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as sock:
            sock.sendall(sent)
            answer = b""
            while part := sock.recv(10_000):
                answer += part
            assert answer.startswith(b"HTTP/1.1 200 OK") if sent.endswith(b"\n") else answer == b""


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"])
def test_what_is_no_http_has_the_same_shape(live: Live, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as sock:
        sock.sendall(sent)
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == 400


# -- clients that leave or do not read


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_queued(slow: Live, stream: bool) -> None:
    owners = slow.service.engine._owners
    before = [slow.send(COMPLETIONS, LONG) for _ in range(4)]
    until(lambda: slow.service.engine.stats.running == 4)
    running = set(owners)
    sock = slow.send(COMPLETIONS, {**LONG, "stream": stream})
    until(lambda: len(owners) == 5)
    [queued] = set(owners) - running
    sock.close()
    until(lambda: queued.done)
    assert queued.choices[0].finish_reason == "abort" and queued.choices[0].outputs == 0
    assert set(owners) == running
    for other in before:
        other.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_leaving_while_running(slow: Live, stream: bool, phase: str) -> None:
    body = {"prompt": [7] * 500 if phase == "prefill" else "x", "max_tokens": 12 if phase == "prefill" else 500}
    sock = slow.send(COMPLETIONS, {**body, "ignore_eos": True, "stream": stream})
    until(lambda: slow.service.engine.stats.running == 1)
    [request] = slow.service.engine._owners
    [choice] = request.choices
    if phase == "decode":
        until(lambda: choice.outputs > 2)
    assert (choice.outputs == 0) == (phase == "prefill")
    sock.close()
    until(lambda: request.done)
    assert choice.finish_reason == "abort"
    until(slow.at_rest)


def test_a_reader_that_stops_reading_delays_nobody(live: Live) -> None:
    """Its answer is generated to the end meanwhile; the pages are free though nothing was read."""
    with live.send(CHAT, {**HELLO, "max_tokens": 450, "ignore_eos": True, "n": 4, "stream": True, "logprobs": True}):
        live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
        until(lambda: live.service.engine.stats.pages_used == 0)
    until(live.at_rest)


# -- the operator's side


def test_an_observer_that_fails_ends_nothing(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []

    def observe(step: Step, seconds: float) -> None:
        calls.append(step)
        raise ValueError("in the observer")

    live.service.engine.on_step.append(observe)
    assert live.post(COMPLETIONS, {**LONG, "max_tokens": 5})["usage"]["completion_tokens"] == 5
    assert len(calls) == 1 and "in the observer" in caplog.text


def test_metrics_have_the_names_that_routers_read(live: Live) -> None:
    def value(name: str) -> float:
        lines = live.request("GET", "/metrics")[2].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")))

    names = [
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_generation_tokens_sum",
        "num_preemptions_total",
    ]
    before = [value(name) for name in names]
    live.post(COMPLETIONS, {"prompt": ["abc", "d"], "max_tokens": 5, "ignore_eos": True})
    assert [value(name) - b for name, b in zip(names, before, strict=True)] == [4, 10, 2, 2, 8, 2, 10, 0]
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
    assert value("cache_config_info") == 1
    lines = live.request("GET", "/metrics")[2].decode().splitlines()
    lengths = [float(x.split()[-1]) for x in lines if x.startswith("vllm:request_generation_tokens_bucket")]
    assert lengths == sorted(lengths) and lengths[-1] == value("request_generation_tokens_count")


def test_health_tells_of_a_stall(llm: LLM, live: Live) -> None:
    until(live.at_rest)
    assert live.request("GET", "/health")[0::2] == (200, b"")
    with serving(llm, stall_timeout=0.2) as server:
        server.service.engine.on_step.append(lambda step, seconds: time.sleep(0.6))
        with server.send(COMPLETIONS, {"prompt": "x", "max_tokens": 3}):
            until(lambda: server.request("GET", "/health")[0] == 503)
            assert b"no step has ended for" in server.request("GET", "/health")[2]
        server.service.engine.on_step.clear()
        until(lambda: server.request("GET", "/health")[0] == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_says_so(
    llm: LLM, live: Live, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(live.at_rest)
    with serving(llm) as server:
        steps = iter(range(5))

        def step(**options: Any) -> Step:
            if next(steps, None) is None:
                raise RuntimeError("secret")
            return Engine.step(llm.engine, **options)

        monkeypatch.setattr(llm.engine, "step", step)
        status, _, data = server.request("POST", COMPLETIONS, {**LONG, "stream": stream})
        assert status == (200 if stream else 503)
        events = data.decode().removesuffix("\n\ndata: [DONE]\n\n").split("data: ") if stream else [data.decode()]
        error = json.loads(events[-1])["error"]
        assert error["code"] == 503 and "the engine stopped, restart the server" in error["message"]
        assert "secret" not in error["message"] and "secret" in caplog.text
        assert server.request("GET", "/health")[0] == 503
        assert server.request("POST", COMPLETIONS, {"prompt": "x"})[0] == 503
    for request in list(llm.engine._batch.running) + list(llm.engine._batch.waiting):
        llm.engine.abort(request.request)
    assert llm.engine.idle
