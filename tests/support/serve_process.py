"""Runs `megakernel serve` in separate processes."""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from api_support import Live
from commands import command

SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--max-model-len", "2048")


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], Live]]:
    """Start a server on a free port; yield its process, the JSON that it prints when it is ready, and a client."""
    with started("--json", *flags) as running:
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
