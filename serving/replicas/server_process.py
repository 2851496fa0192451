"""Runs a replica's own `megakernel serve` process and passes requests and answers through unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any

import aiohttp
from yarl import URL

from megakernel.errors import MegakernelError

Headers = list[tuple[str, str]]
# Headers that are not passed on, because they hold for one connection only or because Ray's proxy sets them itself.
_NOT_PASSED_ON = {"connection", "content-length", "date", "keep-alive", "transfer-encoding", "x-request-id"}
_FLAGS = ("--host", "127.0.0.1", "--port", "0")
# The operating system kills the server when the thread that started it ends (PR_SET_PDEATHSIG, SIGKILL). The server
# itself requests this, because a process with Ray's threads must not run code between fork and exec.
_MAIN = "import ctypes, sys; ctypes.CDLL(None).prctl(1, 9); from megakernel.cli import main; sys.exit(main())"


class ServerProcess:
    """A `megakernel serve` process with the flags `settings`, on a free port of the loopback.

    The server ends when the process that created this object ends. `on_end` is called in another thread if the server
    ends after it was ready. The constructor waits until the server is ready. If the server ends before, the constructor
    raises MegakernelError with the server's own reason."""

    def __init__(self, settings: Mapping[str, Any], on_end: Callable[[], None]) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._on_end, self._ready, self._last_line = on_end, False, ""
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
        self._url: str = json.loads(line)["url"]
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
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
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
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncGenerator[tuple[int, Headers] | bytes]:
        """Pass on a request. Yields status and headers, then pieces of the body. Closing the generator aborts it."""
        session = self._session = self._session or aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        url = URL(self._url + target, encoded=True)
        async with session.request(
            method, url, headers=_passed_on(headers), data=body or None, allow_redirects=False
        ) as answer:
            yield answer.status, _passed_on(answer.headers.items())
            async for piece in answer.content.iter_any():
                yield piece


def _passed_on(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(low, value) for name, value in headers if (low := name.lower()) not in _NOT_PASSED_ON]
