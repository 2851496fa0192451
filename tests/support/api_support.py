"""Runs a server in the test process and sends requests to it."""

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from megakernel import LLM, machine
from megakernel.roofline import machine_ceilings
from megakernel.serving.server.frontend import FrontendServer, listen, url
from megakernel.serving.server.limits import AccessRules, Limits
from megakernel.serving.server.loop import EngineLoop
from megakernel.serving.server.service import Service, Start


@dataclass
class Live:
    """A running server: its frontend and its engine host are threads of this process, but communicate over sockets, as
    separate processes do."""

    host: EngineLoop
    service: Service
    server: FrontendServer
    url: str
    port: int

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, source: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return the response's status, headers with names in lower case, and body. A `body` that is
        a dict or a list is sent as JSON, bytes are sent unchanged, and an iterator is sent in HTTP chunks. `source` is
        the address of the client."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, 300, (source, 0))
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        given = {"Content-Type": "application/json", **(headers or {})} if data is not None else headers or {}
        try:
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """Post `body` and return the decoded JSON of the response, whose status must be `status`."""
        got, _, data = self.request("POST", path, body)
        assert got == status, data
        return json.loads(data)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Post `body` as a streaming request and return the decoded events. The stream must end with [DONE]."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        *events, end, rest = data.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request and return its connection without reading. Closing the connection abandons the request."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        return self.connect(head.encode() + data)

    def connect(self, sent: bytes) -> socket.socket:
        """Open a connection, send bytes, and return the socket."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(sent)
        return sock

    def said(self, *parts: bytes) -> bytes:
        """Send parts one after another, and return everything that the server sends until it closes the connection."""
        with self.connect(parts[0]) as sock:
            for part in parts[1:]:
                sock.sendall(part)
            return sock.makefile("rb").read()

    def metric(self, name: str) -> float:
        """Return the sum of all values in /metrics whose names begin with `name`."""
        lines = self.request("GET", "/metrics")[2].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def at_rest(self) -> bool:
        """Return whether the server holds no request any more and every KV page is free."""
        loop, stats, open_here = self.host, self.host.engine.stats, self.service.engine._choices
        known = loop._jobs or loop._job_of or loop._open_of or open_here
        return not (known or self.server.server_state.tasks or stats.running or stats.waiting or stats.pages_used)


@contextmanager
def serving(
    llm: LLM, *, names: list[str] | None = None, access: AccessRules | None = None, max_waiting: int = 99, **limits: Any
) -> Iterator[Live]:
    """Yield a server on a free port, and stop it afterwards. `limits` are the fields of Limits. Programs are compiled
    when they are needed, because compiling all of them ahead takes longer than most tests."""
    ceilings = machine_ceilings(machine.host(llm.threads))
    host = EngineLoop(llm, source="", frontends=1, max_waiting=max_waiting, ceilings=ceilings)
    start = Start(host.description, 1, "frontend", names, access or AccessRules(), Limits(**limits))
    service = Service(start, llm.codec)
    ready = Event()
    sock = listen("127.0.0.1", 0)
    server = FrontendServer(start, service, ready.set)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    address, port = url(sock), sock.getsockname()[1]
    host._stop_compiling.set()
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


def until(condition: Callable[[], bool], seconds: float = 120, pause: float = 0.005) -> None:
    """Call `condition` every `pause` seconds until it returns true. Fails if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(pause)


def by_choice(body: bytes) -> list[bytes]:
    """Return the events of a stream, choice by choice, because choices may advance in any order. The number of cached
    tokens is left out, because it depends on the replica."""
    body = re.sub(rb'"cached_tokens":\d+', b"", body)

    def choice(event: bytes) -> int:
        found = re.search(rb'"choices":\[\{"index":(\d+)', event)
        return int(found[1]) if found else 99

    return sorted(body.split(b"\n\n"), key=choice)


def user(content: Any, **more: Any) -> dict[str, Any]:
    """Return the field `messages` of a request with one message of a user, which has these contents and fields."""
    return {"messages": [{"role": "user", "content": content, **more}]}


def ids_of(text: str) -> list[int]:
    """Return the token ids of `text` in the byte model, whose vocabulary is the sorted byte alphabet of GPT-2."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    [(piece, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [alphabet.index(character) for character in piece]


def alternating(text: str) -> dict[str, Any]:
    """Return sampling parameters with which a model, whatever its weights, generates the two bytes of `text` in
    alternation."""
    first, second = ids_of(text)
    return {"temperature": 0, "logit_bias": {str(first): 100, str(second): 99}, "frequency_penalty": 2.0}
