"""Runs a replica's own `megakernel serve` process and passes requests and answers through unchanged."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from megakernel.errors import MegakernelError
from megakernel.runtime.cpu.native import simd
from megakernel.serving.server.writer import HEADER, KEY, Replay

Headers = list[tuple[str, str]]
# Headers that are not passed on, because they hold for one connection only or are set for each answer anew.
_NOT_PASSED_ON = {"connection", "content-length", "date", "keep-alive", "transfer-encoding", "x-request-id", HEADER}
_FLAGS = ("--host", "127.0.0.1", "--port", "0")
# The operating system kills the server when the thread that started it ends (PR_SET_PDEATHSIG, SIGKILL). The server
# requests this after its start, because a process with Ray's threads must not run code between fork and exec.
_MAIN = "import ctypes, sys; ctypes.CDLL(None).prctl(1, 9); from megakernel.cli import main; sys.exit(main())"


class Head(NamedTuple):
    """Status and headers of an answer. Replicas with equal `kind` give bit-identical answers, so one replica can
    continue an answer that another has begun."""

    status: int
    headers: Headers
    kind: str

    @property
    def streams(self) -> bool:
        return dict(self.headers).get("content-type", "").startswith("text/event-stream")


Part = Head | bytes  # an answer consists of a Head, followed by pieces of the body


class ServerProcess:
    """A `megakernel serve` process with the flags `settings`, on a free port of 127.0.0.1.

    The server ends when the process that created this object ends. `on_end` is called in another thread if the server
    ends after it was ready. The constructor waits until the server is ready. If the server ends before, the constructor
    raises MegakernelError with the server's own reason."""

    def __init__(self, settings: Mapping[str, Any], on_end: Callable[[], None]) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._on_end, self._ready, self._last_line = on_end, False, ""
        self._key = secrets.token_hex(16)
        begun: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        watch = threading.Thread(target=self._watch, args=(begun,), daemon=True)
        watch.start()
        self._process = begun.get()
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as given:  # flags go through a pipe, because other users can read a command line
            given.write(json.dumps(dict(settings)))
        line = self._process.stdout.readline()
        if not line:
            watch.join()
            raise MegakernelError(self._last_line.removeprefix("megakernel: error: ") or "the server did not start")
        facts = json.loads(line)
        self._url: str = facts.pop("url")
        del facts["kv_tokens"]  # answers do not depend on the size of the KV pool
        self._kind = json.dumps([settings, facts, simd()])
        self._ready = True

    def _watch(self, begun: SimpleQueue[subprocess.Popen[str]]) -> None:
        """Start the server, copy its log to standard error, and wait for its end. The thread that starts the server
        also waits for it, because the server is killed when this thread ends."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, "serve", "--json", *_FLAGS, "--config", "/dev/stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), KEY: self._key},
        )
        begun.put(process)
        assert process.stderr is not None
        for line in process.stderr:
            self._last_line = line.strip() or self._last_line
            sys.stderr.write(line)
        process.wait()
        if self._ready:
            self._on_end()

    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes, replay: Replay | None = None
    ) -> AsyncGenerator[Part]:
        """Pass on a request and yield the parts of the answer: the head, then the body. With `replay`, streams have
        marks that say which tokens have been sent (see `Replay`). Closing the generator aborts the request."""
        session = self._session = self._session or aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        url = URL(self._url + target, encoded=True)
        own = [(HEADER, replay.header(self._key))] if replay else []
        async with session.request(
            method, url, headers=_passed_on(headers) + own, data=body or None, allow_redirects=False
        ) as answer:
            yield Head(answer.status, _passed_on(answer.headers.items()), self._kind)
            async for piece in answer.content.iter_any():
                yield piece


def _passed_on(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(low, value) for name, value in headers if (low := name.lower()) not in _NOT_PASSED_ON]
