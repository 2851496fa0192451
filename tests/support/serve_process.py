"""Runs `megakernel serve` in separate processes."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from api_support import Live, until
from commands import command

SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--max-model-len", "2048")
# Code that makes each step of a server take at least 3 ms, so that a test can act before an answer ends.
SLOW = """
import time
from megakernel.serving.engine.engine import Engine
step = Engine.step
Engine.step = lambda self, **options: (time.sleep(0.003), step(self, **options))[1]
"""


@contextmanager
def process(*flags: str, first: str = "") -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], Live]]:
    """Start a server on a free port; yield its process, the JSON that it prints when it is ready, and a client."""
    with started("--json", *flags, first=first) as running:
        assert running.stdout is not None and running.stderr is not None
        line = running.stdout.readline()
        assert line, running.stderr.read()
        facts = json.loads(line)
        yield running, facts, at(facts["url"])


def at(url: str) -> Live:
    """Return a client for a server in another process."""
    return Live(None, None, None, url, urlsplit(url).port)  # type: ignore[arg-type]


@contextmanager
def started(*flags: str, first: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a server on a free port, in a process that runs the Python code `first` before."""
    arguments = command("serve", "--port", "0", "--threads", "1", *SMALL, *flags)
    code = arguments.index("-c") + 1
    arguments[code] = f"{first}\n{arguments[code]}"
    running = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def begin_stream(server: Live, tokens: int) -> socket.socket:
    """Request a streamed completion, and return the socket once the response has begun."""
    body = {"prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True, "n": 2}
    sock = server.send("/v1/completions", body)
    assert sock.recv(100_000).startswith(b"HTTP/1.1 200 OK")
    return sock


def rest(sock: socket.socket) -> bytes:
    return sock.makefile("rb").read()


def children(pid: int) -> list[int]:
    """Return the ids of the processes that the first thread of `pid` has started and that have not ended."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(child for child in map(int, found) if state(child) not in "ZX")


def state(pid: int) -> str:
    """Return the state letter of a process from /proc, such as T for stopped, or X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@contextmanager
def asleep(pid: int) -> Iterator[None]:
    """Suspend a process with SIGSTOP for the duration of the `with` block."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
