"""A fake server that runs on a thread, for tests of the serving benchmark. It implements only the part of the OpenAI
API that the benchmark calls, and fails in the ways that a test selects."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any


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
    connections: int = 0
    running: int = 0
    most_running: int = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for _ in range(self.close_after):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.headers.append(head)
                path = head.split()[1]
                size = next((int(h.split(":")[1]) for h in head.splitlines() if h.lower().startswith("content-len")), 0)
                body = await reader.readexactly(size)
                if path.endswith("/v1/models"):
                    self._whole(writer, 200, {"data": [{"id": self.model}]})
                elif path.endswith("/v1/completions"):
                    self.running += 1
                    self.most_running = max(self.most_running, self.running)
                    try:
                        await self._completion(writer, json.loads(body))
                    finally:
                        self.running -= 1
                elif path in self.pages:
                    self._whole(writer, 200, self.pages[path])
                else:
                    self._whole(writer, 404, {"detail": "Not Found"})
                await writer.drain()
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _completion(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        self.requests.append(request)
        prompt, tokens = len(request["prompt"]), request["max_tokens"]
        fault = self.faults.get(prompt)
        await asyncio.sleep(self.delay_s)
        if isinstance(fault, int):
            self._whole(writer, fault, {"error": {"message": "no", "type": "x", "param": None, "code": fault}})
            return
        if fault == "silent":
            raise ConnectionError
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens - (fault == "short")}
        if not request["stream"]:
            self._whole(writer, 200, {"choices": [{"text": "x"}], "usage": usage})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        events = [{"choices": [{"text": "é"}]}] * tokens + [{"choices": [], "usage": usage}]
        if fault == "error":
            events = [{"error": {"message": "gone", "type": "x", "param": None, "code": 500}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * (fault != "cut")
        for line in lines:
            data = line.encode()
            # Each event spans two HTTP chunks, because a client may not rely on one chunk per event.
            for piece in (data[:9], data[9:]):
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
                await asyncio.sleep(self.delay_s)
        writer.write(b"0\r\n\r\n")


@contextmanager
def answering(*raw: bytes, endless: bytes = b"") -> Iterator[str]:
    """Run a server that answers the first request with `raw[0]`, the second with `raw[1]` and so on, and the rest with
    the last. Each answer is followed by `endless`, again and again, and then the connection closes. Yields its URL."""
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


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free local port until the `with` block ends."""
    begun = threading.Event()
    end: list[Callable[[], object]] = []

    async def serve() -> None:
        ended = asyncio.Event()
        end.append(partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set))
        made = await asyncio.start_server(server.connection, "127.0.0.1", 0)
        server.url = "http://{}:{}".format(*made.sockets[0].getsockname())
        begun.set()
        await ended.wait()
        made.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    begun.wait()
    try:
        yield server
    finally:
        end[0]()
        thread.join()
