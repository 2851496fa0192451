"""A fake server that runs on a thread, for tests of the serving benchmark. It implements only the part of the OpenAI
API that the benchmark calls, and fails in the ways that a test selects."""

import gc
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from loopback import Answer, loopback


@dataclass
class FakeServer:
    """The server's settings, and what it has recorded. `url` is set as soon as the server runs. `faults[n]` is how a
    request with a prompt of n tokens fails. A number is an HTTP status. "cut" ends the stream without `[DONE]`, "error"
    sends an error event, "short" reports one generated token too few, and "silent" closes the connection without a
    response."""

    model: str = "random:tiny"
    delay_s: float = 0.0
    faults: dict[int, int | str] = field(default_factory=dict)
    pages: dict[str, Any] = field(default_factory=dict)  # the responses to other paths, by path: text or JSON
    close_after: int = 10**9  # number of responses after which the server closes a connection
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    responses: Counter[Any] = field(default_factory=Counter)  # the number of responses on each connection
    streams: list[dict[str, Any]] = field(default_factory=list)  # the requests whose streams are running
    at_once: list[int] = field(default_factory=list)  # how many ran, whenever one began

    def answer(self, asked: BaseHTTPRequestHandler) -> Answer | None:
        self.headers.append(f"{asked.requestline}\n{asked.headers}")
        self.responses[asked.client_address] += 1
        asked.close_connection = self.responses[asked.client_address] >= self.close_after
        body = asked.rfile.read(int(asked.headers["Content-Length"] or 0))
        if asked.path.endswith("/v1/models"):
            return _told({"data": [{"id": self.model}]})
        if asked.path.endswith("/v1/completions"):
            return self.completion(json.loads(body))
        return _told(self.pages[asked.path]) if asked.path in self.pages else _told({"detail": "Not Found"}, 404)

    def completion(self, request: dict[str, Any]) -> Answer | None:
        self.requests.append(request)
        prompt, tokens = len(request["prompt"]), request["max_tokens"]
        fault = self.faults.get(prompt)
        time.sleep(self.delay_s)
        if isinstance(fault, int):
            return _told({"error": {"message": "no", "type": "x", "param": None, "code": fault}}, fault)
        if fault == "silent":
            return None
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens - (fault == "short")}
        if not request["stream"]:
            return _told({"choices": [{"text": "x"}], "usage": usage})
        events = [{"choices": [{"text": "é"}]}] * tokens + [{"choices": [], "usage": usage}]
        if fault == "error":
            events = [{"error": {"message": "gone", "type": "x", "param": None, "code": 500}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * (fault != "cut")
        return Answer(body=self._stream(request, lines))

    def _stream(self, request: dict[str, Any], lines: list[str]) -> Iterator[bytes]:
        """Yield each event in two HTTP chunks, because a client may not rely on one chunk per event."""
        self.streams.append(request)
        self.at_once.append(len(self.streams))
        for data in map(str.encode, lines):
            for piece in (data[:9], data[9:]):
                yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
                time.sleep(self.delay_s)
        self.streams.remove(request)
        yield b"0\r\n\r\n"


def _told(value: Any, status: int = 200) -> Answer:
    return Answer(status, (value if isinstance(value, str) else json.dumps(value)).encode())


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free local port until the `with` block ends."""
    with loopback(server.answer) as server.url:
        yield server


@contextmanager
def answering(*raw: bytes, endless: bytes = b"") -> Iterator[str]:
    """Run a server that answers the first request with `raw[0]`, the second with `raw[1]` and so on, and the rest with
    the last. Each answer is followed by `endless`, again and again, and then the connection closes. Yields its URL."""
    gc.disable()  # in the depth of a nested answer, a finalizer would exceed the recursion limit
    listener = socket.create_server(("127.0.0.1", 0))
    asked = 0

    def serve() -> None:
        nonlocal asked
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(raw[min(asked, len(raw) - 1)])
                    asked += 1
                    while endless and asked >= len(raw):
                        connection.sendall(endless)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        gc.enable()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


DEEP = b'{"choices":' + b"[" * 200_000
# Answers that no OpenAI server gives. The first value is sent once, and then the second one again and again.
HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "choices": (whole(b'data: {"choices":"x"}\n\n'), b""),
    "choice": (whole(b'data: {"choices":["x"]}\n\n'), b""),
    "delta": (whole(b'data: {"choices":[{"delta":7}]}\n\n'), b""),
    "list": (whole(b"data: [1]\n\n"), b""),
    "usage": (whole(b'data: {"choices":[],"usage":"x"}\n\ndata: {"usage":{"completion_tokens":"9"}}\n\n'), b""),
    "deep": (whole(b"data: " + DEEP + b"\n\n"), b""),
    "deep error": (whole(DEEP, "500 X"), b""),
    "no json": (whole(b"data: {\xff\n\n"), b""),
    "endless line": (b"HTTP/1.1 200 OK\r\n\r\ndata: ", b"x" * 65536),
    "endless error": (b"HTTP/1.1 500 OK\r\n\r\n", b"x" * 65536),
    "endless head": (b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 60_000 + b"\r\n"),
    "large chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n", b"x" * 65536),
    "huge chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", b""),
    "odd chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nxxxxx", b""),
    "cut trailer": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b""),
    "no status": (b"HTTP/1.1\r\n\r\n", b""),
    "nothing": (b"", b""),
}
