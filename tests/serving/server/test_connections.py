"""HTTP connections: protocols, methods and headers that clients use, and clients that send without reading."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import Mock, call

import pytest
from api_support import Live, serving, until
from uvicorn import Config
from uvicorn.server import ServerState

from megakernel import LLM
from megakernel.serving.server import protocol, writer
from megakernel.serving.server.limits import AccessRules, local_names

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "x", "max_tokens": 2, "ignore_eos": True}).encode()
LIMITS = {"max_context": 2048, "backend": "null"}


def post(body: bytes = BODY, *headers: str, path: str = COMPLETIONS, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


CLOSE = "Connection: close"
_H2C = ("Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")


@pytest.mark.parametrize(
    "headers",
    [
        ("Connection: Upgrade, HTTP2-Settings", *_H2C),  # sent by java.net.http and `curl --http2`
        ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13"),
        ("Connection: keep-alive, Upgrade", "Upgrade: TLS/1.2, h2c"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_is_ignored(live: Live, headers: tuple[str, ...], chunked: bool) -> None:
    """Requests follow each other on one connection. The body of the second comes later than its header."""
    first = post(BODY, *headers)
    head, _, body = post(BODY, *headers).partition(b"\r\n\r\n")
    if chunked:
        head = head.replace(f"Content-Length: {len(BODY)}".encode(), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    get = "\r\n".join(["GET /version HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    text = live.said(first + head + b"\r\n\r\n", body[:9], body[9:] + get + get, last)
    assert text.count(b"HTTP/1.1 200 OK") == 5 and text.count(b'"completion_tokens":2') == 2
    assert text.count(b'"version"') == 2 and b"HTTP/1.1 4" not in text and b"101" not in text.split(b"\r\n")[0]


@pytest.mark.parametrize(
    "path", ["/health", "/version", "/v1/models", "/", "/chat", "/metrics", "/nowhere", COMPLETIONS]
)
def test_head_is_get_without_the_body(live: Live, path: str) -> None:
    answers = [live.said(f"{m} {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode()) for m in ("HEAD", "GET")]
    (head, _, nothing), (same, _, _) = (answer.partition(b"\r\n\r\n") for answer in answers)
    assert nothing == b"" and head.split(b"\r\n")[0] == same.split(b"\r\n")[0]
    names = [[line.partition(b":")[0] for line in lines.split(b"\r\n")] for lines in (head, same)]
    assert names[0] == names[1]


def test_an_old_client_gets_no_chunks(live: Live) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}).encode()
    head, _, text = live.said(post(body, version="1.0")).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower()
    assert text.startswith(b"data: {") and text.endswith(b"\n\ndata: [DONE]\n\n")
    head, _, text = live.said(post(version="1.0")).partition(b"\r\n\r\n")
    assert f"content-length: {len(text)}".encode() in head and json.loads(text)["usage"]["completion_tokens"] == 2
    assert b"chunked" in live.said(post(body, CLOSE))


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "Identity", ""])
def test_a_compressed_body_is_a_415(live: Live, coding: str) -> None:
    text = live.said(post(BODY, f"Content-Encoding: {coding}", CLOSE))
    if coding.lower() in ("identity", ""):
        assert text.startswith(b"HTTP/1.1 200 ")
    else:
        assert text.startswith(b"HTTP/1.1 415 ") and b"send it without Content-Encoding" in text


HOSTS = {
    200: ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "localhost:"],
    403: ["", "evil.com", "127.0.0.1.evil.com"],
    400: ["evil.com:localhost", "localhost@evil.com", "[::1].evil.com", "[localhost]", "localhost, evil.com"],
}
HOSTS[400] += [f"localhost\r\nHost: {other}" for other in ("evil.com", "localhost")]


@pytest.mark.parametrize(("status", "host"), [(status, host) for status, hosts in HOSTS.items() for host in hosts])
def test_the_host_header_is_one_name(guarded: Live, status: int, host: str) -> None:
    answer = guarded.said(f"GET /version HTTP/1.1\r\nHost: {host}\r\n{CLOSE}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and (b"--allowed-hosts" in answer) == (status == 403)


HOST = "Host: localhost"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["OPTIONS / HTTP/1.0"], 204),  # the check of a balancer
        (["GET /version HTTP/1.0"], 200),
        (["GET /version HTTP/1.1", HOST, "Authorization: Bearer a", "Authorization: Bearer b"], 400),
        (["GET /version HTTP/1.1", HOST, "X-Api-Key: a", "X-Api-Key: a"], 400),
        (["GET /v1/models/ HTTP/1.1", HOST], 200),
        (["GET /health HTTP/1.1", "Host: evil.com"], 200),
    ],
)
def test_headers_that_are_absent_or_sent_twice(guarded: Live, lines: list[str], status: int) -> None:
    assert guarded.said("\r\n".join([*lines, CLOSE, "", ""]).encode()).startswith(b"HTTP/1.1 %d " % status)


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Live]:
    with serving(llm, access=AccessRules(hosts=local_names("localhost", "127.0.0.1"))) as made:
        yield made


# -- pipelining: requests that arrive before the previous one is answered

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_only_sends_is_stopped(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def counted(self: protocol.HttpProtocol, data: bytes) -> None:
        nonlocal most
        received(self, data)
        most = max(most, len(self.pipeline))

    received = protocol.HttpProtocol.data_received
    monkeypatch.setattr(protocol.HttpProtocol, "data_received", counted)
    with live.connect(GET * 1000) as sock:
        sock.settimeout(0.2)
        try:
            for _ in range(19):
                sock.sendall(GET * 1000)
        except OSError:
            pass
        sock.settimeout(30)
        text = b""
        with suppress(ConnectionResetError):  # the server closes the connection although it has not read everything
            while piece := sock.recv(1 << 20):
                text += piece
    assert most == protocol._MOST_WAITING and text.count(b"HTTP/1.1 200 OK") <= most + 1
    assert live.request("GET", "/health")[0] == 200
    until(lambda: not live.server.server_state.connections)


@pytest.mark.parametrize("stream, late", [(False, False), (True, False), (True, True)])
def test_a_client_that_stops_sending_is_answered(live: Live, stream: bool, late: bool) -> None:
    live.host.on_step.append(lambda step, seconds: time.sleep(0.002))
    with live.connect(post(json.dumps({"prompt": "x", "max_tokens": 99, "stream": stream}).encode())) as sock:
        file = sock.makefile("rb")
        head = file.readline() if late else b""
        sock.shutdown(socket.SHUT_WR)
        text = head + file.read()
    assert b"HTTP/1.1 200 OK" in text and b'"finish_reason":"length"' in text


def test_a_client_that_leaves_a_silent_stream_is_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SILENCE", 3600.0)
    held, jobs = threading.Event(), live.host._job_of  # an earlier test's last step may still be reported
    live.host.on_step.append(lambda step, seconds: jobs and held.wait(60) and None)
    with live.connect(post(json.dumps({"prompt": "x", "max_tokens": 9, "stream": True}).encode())) as sock:
        sock.makefile("rb").readline()
    until(lambda: not live.server.server_state.connections)
    held.set()
    until(live.at_rest)


def test_garbage_after_a_request_waits_for_its_answer(live: Live) -> None:
    text = live.said(post() + b"garbage\r\n\r\n" * 9)
    assert text.startswith(b"HTTP/1.1 200 OK") and text.count(b"HTTP/1.1") == 1
    json.loads(text.partition(b"\r\n\r\n")[2])
    broken = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"") + b"zz\r\n"
    assert live.said(broken).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_leaves_with_requests_behind_is_noticed(live: Live) -> None:
    """If the client leaves, generation stops although uvicorn reports this only to the request that arrived last."""
    live.host.on_step.append(lambda step, seconds: time.sleep(0.002))
    before = live.host.engine.stats.counts.generated
    body = json.dumps({"prompt": "x", "max_tokens": 2000, "ignore_eos": True}).encode()
    with live.connect(post(body) + GET):
        until(lambda: not live.at_rest())
    until(live.at_rest)
    assert live.host.engine.stats.counts.generated - before < 1900


@pytest.mark.parametrize("unsent", [0, 9])
def test_an_idle_client_does_not_delay_the_end(unsent: int) -> None:
    """A client of HTTPS that does not read never ends TLS."""
    client = protocol.HttpProtocol(Config(Mock(), log_config=None), ServerState(), {}, Mock())
    client.transport, client.loop = Mock(get_write_buffer_size=lambda: unsent), Mock()
    client.shutdown()
    assert client.transport.close.called
    assert client.loop.call_later.mock_calls == [call(1.0, client.transport.abort)] * (unsent == 0)
