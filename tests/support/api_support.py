"""A live server on a model, and plain ways to talk to it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from megakernel import LLM, machine
from megakernel.roofline import machine_ceilings
from megakernel.serving.api.access import Access
from megakernel.serving.api.limits import Limits
from megakernel.serving.api.server import Server, listen, url
from megakernel.serving.api.service import Service
from megakernel.serving.engine_host import EngineHost


@dataclass
class Live:
    """A frontend and an engine's host as threads of this process, between them what is between processes."""

    host: EngineHost
    service: Service
    server: Server
    url: str
    port: int

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body. Dicts and lists go as JSON, bytes as they are, an iterator in chunks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        given = {"Content-Type": "application/json", **(headers or {})} if data is not None else headers or {}
        try:
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """The JSON that comes back, which must come with `status`."""
        got, _, data = self.request("POST", path, body)
        assert got == status, data
        return json.loads(data)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, whose last must be [DONE], as JSON."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        *events, end, rest = data.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a request was sent; closing it is leaving."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(head.encode() + data)
        return sock

    def at_rest(self) -> bool:
        """Nobody is known any more, and every page is free."""
        loop, stats = self.host.loop, self.host.loop.engine.stats
        known = loop.owners or loop._jobs or loop._open or self.service.engine._choices
        return not (known or stats.running or stats.waiting or stats.pages_used)


@contextmanager
def serving(llm: LLM, *, names: list[str] | None = None, access: Access | None = None, **limits: Any) -> Iterator[Live]:
    """A server on a free port, gone afterwards."""
    allowed = Limits(**limits)
    ceilings = machine_ceilings(machine.host(llm.threads))
    name = (names or [llm.model])[0]
    host = EngineHost(llm, source="", name=name, frontends=1, max_waiting=allowed.max_waiting, ceilings=ceilings)
    service = Service(host.description, llm.tokenizer, 1, "frontend", names, access, allowed)
    ready = Event()
    sock = listen("127.0.0.1", 0)
    server = Server(service, on_ready=ready.set, drain_seconds=10)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    address, port = url(sock), sock.getsockname()[1]
    host.start()
    thread.start()
    assert ready.wait(30)
    try:
        yield Live(host, service, server, address, port)
    finally:
        server.end()
        thread.join(30)
        host.close()
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition that must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)
