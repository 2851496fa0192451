"""Access control of the HTTP server, and limits on the work that one request can cause."""

import asyncio
import json
import socket
from typing import Any

import numpy as np
import openai
import pytest
from api_support import Live, serving, until, user
from starlette.types import Message, Receive, Scope, Send

from megakernel import LLM
from megakernel.serving.server import http, limits
from megakernel.serving.server.limits import MAX_MESSAGES, MAX_PARTS, MAX_VALUES, AccessRules, local_names

CONTEXT = 256
CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
LIMITS = {"max_context": CONTEXT, "backend": "null"}


def message(answer: tuple[int, dict[str, str], bytes]) -> str:
    """Return the message of an error answer, after a check that the error has exactly the fields of its API."""
    status, _, data = answer
    told = json.loads(data)
    error = told["error"]
    if told.get("type") == "error":
        assert set(error) == {"message", "type"}
    else:
        assert error["code"] == status and set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def begun(live: Live, head: str, body: bytes = b"") -> socket.socket:
    """Open a connection, send a request head and the given bytes of its body, and return the socket."""
    return live.connect(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)


def test_a_key_opens_everything_and_only_health_needs_none(llm: LLM) -> None:
    with serving(llm, access=AccessRules(keys=("sésame", "second")), names=["a", "b"]) as guarded:
        paths = [*json.loads(guarded.request("GET", "/openapi.json", headers=bearer("second"))[2])["paths"]]
        assert {TOKENIZE, DETOKENIZE, COMPLETIONS, "/metrics"} <= {*paths}
        for path in [*paths, "/timeline", "/openapi.json", "/nowhere"]:
            odd = [{"Authorization": text} for text in ("second", "Basic *")]
            for header in ({}, bearer("wrong"), {"x-api-key": "wrong"}, *odd):
                answer = guarded.request("POST" if path == TOKENIZE else "GET", path, headers=header)
                if path == "/health":
                    assert answer[0] == 200
                else:
                    assert answer[0] == 401 and "the API key is missing or wrong" in message(answer), path
                    assert answer[1]["www-authenticate"] == "Bearer"
        utf8 = {"Authorization": b"Bearer s\xc3\xa9same".decode("latin-1")}
        for header in (bearer("second"), utf8, {"x-api-key": "second"}):
            status, _, data = guarded.request("GET", "/v1/models", headers=header)
            assert status == 200 and [model["id"] for model in json.loads(data)["data"]] == ["a", "b"]
        sdk = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="second", max_retries=0)
        assert sdk.completions.create(model="b", prompt="x", max_tokens=1).model == "b"


def test_metrics_can_be_opened(llm: LLM) -> None:
    with serving(llm, access=AccessRules(keys=("k",), open_metrics=True)) as guarded:
        assert guarded.request("GET", "/metrics")[0] == 200
        assert guarded.request("GET", "/v1/models")[0] == 401
        operations = json.loads(guarded.request("GET", "/openapi.json", headers=bearer("k"))[2])["paths"]
        guards = {path: "security" in next(iter(operation.values())) for path, operation in operations.items()}
        assert not guards.pop("/health") and not guards.pop("/metrics") and all(guards.values())


def test_only_a_server_that_others_cannot_reach_checks_its_name() -> None:
    assert local_names("box", "127.0.1.1") == {"localhost", "127.0.0.1", "::1", "127.0.1.1", "box"}
    assert local_names("::1", "::1") == {"localhost", "127.0.0.1", "::1"}
    assert local_names("0.0.0.0", "0.0.0.0") is local_names("::", "::") is local_names("", "10.0.0.3") is None


def test_pages_of_named_sites_may_ask(llm: LLM, live: Live) -> None:
    page = {"Origin": "https://chat.example"}
    ask = page | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(llm, access=AccessRules(keys=("k",), origins=("https://chat.example",))) as server:
        status, headers, _ = server.request("OPTIONS", COMPLETIONS, headers=ask)  # a preflight has no key
        assert status == 200 and headers["access-control-allow-origin"] == "https://chat.example"
        for header in ({}, bearer("k")):
            _, headers, _ = server.request("GET", "/v1/models", headers=page | header)
            assert headers["access-control-allow-origin"] == "https://chat.example"
        other = ask | {"Origin": "https://evil.example"}
        assert "access-control-allow-origin" not in server.request("OPTIONS", COMPLETIONS, headers=other)[1]
    status, headers, _ = live.request("OPTIONS", COMPLETIONS, headers=ask)
    assert status == 405 and "access-control-allow-origin" not in headers


def test_no_body_is_read_before_its_sender_was_let_in(llm: LLM) -> None:
    """The server answers although only the first byte of the body ever arrives."""
    with serving(llm, access=AccessRules(keys=("k",))) as guarded:
        for request, key, status in (
            (f"POST {COMPLETIONS}", "wrong", 401),
            (f"POST {TOKENIZE}", "wrong", 401),
            ("POST /nowhere", "k", 404),
            ("GET /metrics", "k", 200),
            (f"PUT {COMPLETIONS}", "k", 405),
        ):
            head = f"{request} HTTP/1.1\nHost: localhost\nAuthorization: Bearer {key}\nContent-Length: 9000000"
            with begun(guarded, head, b"{") as sock:
                assert sock.recv(100).startswith(f"HTTP/1.1 {status} ".encode()), request


def test_what_was_refused_may_arrive_and_the_connection_goes_on(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(live, "POST /nowhere HTTP/1.1\nHost: x\nContent-Length: 3", b"1") as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 404 ")
        sock.sendall(b"23GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in sock.makefile("rb").read()
    monkeypatch.setattr(live.server.config, "timeout_keep_alive", 1)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    with begun(live, "POST /nowhere HTTP/1.1\nHost: x\nContent-Length: 3", b"1") as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 404 ")
        sock.sendall(b"2")
        sock.makefile("rb").read()  # the server closes the connection, because byte 3 never arrives


@pytest.mark.parametrize(("path", "status"), [(TOKENIZE, 413), ("/nowhere", 404), ("/metrics", 405)])
def test_a_client_that_still_sends_is_not_reset(live: Live, path: str, status: int) -> None:
    head = f"POST {path} HTTP/1.1\nHost: x\nContent-Length: 40000000\nConnection: close"
    with begun(live, head) as sock:
        assert sock.recv(100, socket.MSG_PEEK).startswith(f"HTTP/1.1 {status} ".encode())
        for _ in range(40):
            sock.sendall(b"x" * 1_000_000)
        answer = sock.makefile("rb").read()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status


def test_all_bodies_share_one_budget(llm: LLM) -> None:
    with serving(llm, max_body=1000, max_bodies=1500) as small:
        head = f"POST {TOKENIZE} HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: 1000"
        body = json.dumps({"prompt": "x"}).encode().ljust(1000)
        first = begun(small, head, body[:900])
        until(lambda: small.request("POST", TOKENIZE, body)[0] == 503)
        answer = small.request("POST", TOKENIZE, body)
        assert "all requests together would be larger than 1500 bytes" in message(answer)
        assert answer[1]["retry-after"] == "5"
        assert small.request("POST", TOKENIZE, body.rstrip())[0] == 200  # one that fits
        first.sendall(body[900:])
        assert first.recv(100).startswith(b"HTTP/1.1 200 OK")
        for _ in range(3):  # a body stops counting towards max_bodies when its request ends
            until(lambda: small.request("POST", TOKENIZE, body)[0] == 200)
            begun(small, head, body[:900]).close()
            until(lambda: small.request("POST", TOKENIZE, body)[0] == 200)
            until(lambda: small.request("POST", TOKENIZE, b"{".ljust(1000))[0] == 400)
        first.close()


def test_others_have_their_turn_between_large_bodies() -> None:
    """Three large bodies arrive at once. The application gets them one at a time, with at least TURNS iterations of the
    event loop in between."""
    rounds, begun = 0, list[int]()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(rounds)

    async def receive() -> Message:
        return {"type": "http.request", "body": b" " * (http.LARGE_BODY + 1), "more_body": False}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def post() -> None:
        gate = http.Gate(application, access=AccessRules(), limits=limits.Limits(), max_values=9, takes_body={TOKENIZE})
        scope = {"type": "http", "method": "POST", "path": TOKENIZE, "headers": []}
        clients = asyncio.gather(*(gate(scope, receive, send) for _ in range(3)))
        nonlocal rounds
        while not clients.done():
            await asyncio.sleep(0)
            rounds += 1

    asyncio.run(post())
    assert len(begun) == 3 and min(np.diff(begun)) >= http.TURNS


def test_values_are_counted_without_parsing() -> None:
    flat = json.dumps({"a": [1, 2, 3], "b": {}}).encode()  # { 1, [ 1, commas 3, { 1
    assert limits.has_more_values(flat, 6) and not limits.has_more_values(flat, 7)
    text = json.dumps({"x": "\\", "prompt": ',,[[{{\\",,\\\\,,' * 99}).encode()
    assert limits.has_more_values(text, 2) and not limits.has_more_values(text, 3)
    assert limits.has_more_values(b'"' * 100 + b"," * 9, 9)
    assert limits.max_values(100) == MAX_VALUES and limits.max_values(1 << 20) > 1 << 20


TOO_LONG = f"maximum context length is {CONTEXT} tokens"


@pytest.mark.parametrize(
    ("path", "body", "status", "limit"),
    [
        (DETOKENIZE, {"tokens": [7] * (CONTEXT + 1)}, 400, TOO_LONG),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}, 400, f"at most {MAX_MESSAGES}"),
        (CHAT, user([{"type": "text", "text": ""}] * (MAX_PARTS + 1)), 400, f"at most {MAX_PARTS} items"),
        (DETOKENIZE, {"tokens": [7] * MAX_VALUES}, 413, f"more than {MAX_VALUES} JSON values"),
        (TOKENIZE, {"messages": [{"role": "user", "content": ""}] * MAX_VALUES}, 413, f"more than {MAX_VALUES}"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, 400, "up to 64 texts"),
    ],
)
def test_too_much_is_refused_before_it_is_tokenised(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, status: int, limit: str
) -> None:
    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("the tokenizer was called")

    for name in ("encode", "decode", "apply_chat_template"):
        monkeypatch.setattr(live.service.tokenizer, name, unexpected)
    answer = live.request("POST", path, body)
    assert answer[0] == status and limit in message(answer)


def test_prompts_together_are_limited(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 600)
    most = limits.max_values(CONTEXT)
    monkeypatch.setattr(live.service, "_most", most)
    answer = live.request("POST", COMPLETIONS, {"prompt": ["a" * 250] * (most // 250 + 1), "max_tokens": 1})
    assert answer[0] == 400 and f"may have {most} tokens together" in message(answer)


def test_the_longest_that_fits_is_tokenised(live: Live) -> None:
    assert live.post(DETOKENIZE, {"tokens": [7] * CONTEXT})["prompt"]
    chat = live.post(TOKENIZE, {"messages": [{"role": "user", "content": "a" * CONTEXT}]}, 400)
    assert f"{TOO_LONG}, but the conversation has {CONTEXT + len('<user><assistant>')}" in chat["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (TOKENIZE, {"prompt": "a"}, "encode"),
        (TOKENIZE, {"prompt": "a", "add_special_tokens": False}, "encode"),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1}, "encode"),
        (COMPLETIONS, {"prompt": [[7]], "max_tokens": 1, "echo": True}, "decode"),
        (DETOKENIZE, {"tokens": [7]}, "decode"),
        (CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}, "apply_chat_template"),
    ],
)
def test_the_loop_never_encodes(live: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, name: str) -> None:
    on_loop: list[bool] = []
    work = getattr(live.service.tokenizer, name)

    def watched(*given: Any, **options: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return work(*given, **options)

    monkeypatch.setattr(live.service.tokenizer, name, watched)
    live.post(path, body)
    assert on_loop and not any(on_loop)
