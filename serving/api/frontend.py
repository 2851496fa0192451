"""The process of a frontend: `python -m megakernel.serving.api.frontend`, with its `Start` on standard input.

It ends when it is told to (SIGTERM), or when the process that started it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import shutil
import socket
import sys

import msgspec

from ...errors import MegakernelError
from ...model import load_tokenizer
from ..seam import Description
from .access import Access
from .limits import Limits
from .server import Server, allow_connections
from .service import Service

_GC_THRESHOLD = 5_000  # objects, of Python's default 700; to collect 50,000 took 95 ms, and every request waited
READY = b"R"  # what a frontend says to its parent when it accepts connections


class Start(msgspec.Struct, frozen=True):
    """What a frontend is told.

    number    its row on the board
    identity  its name at the engine
    listener  file descriptor of the socket that all frontends accept connections from
    parent    file descriptor of a socket whose other end the parent keeps open while it lives
    tool_parser  how the model writes calls; None: what its chat template says
    """

    description: Description
    number: int
    identity: str
    names: list[str] | None
    access: Access
    limits: Limits
    drain_seconds: float
    log_level: int
    listener: int
    parent: int
    tool_parser: str | None = None


def main(start: Start) -> int:
    """Serve until the end: the exit status."""
    logging.basicConfig(level=start.log_level, format="megakernel: %(levelname)s: %(message)s")
    allow_connections()
    parent = socket.socket(fileno=start.parent)
    tokenizer = load_tokenizer(start.description.source)
    service = Service(
        start.description,
        tokenizer,
        start.number,
        start.identity,
        start.names,
        start.access,
        start.limits,
        start.tool_parser,
    )
    gc.set_threshold(_GC_THRESHOLD)  # Nothing that a token makes is part of a cycle.
    orphaned = False

    def gone() -> None:
        nonlocal orphaned
        orphaned = True
        asyncio.get_running_loop().remove_reader(parent)
        service.engine.die("the engine's process ended, restart the server")
        server.end()

    def ready() -> None:
        gc.collect()
        gc.freeze()  # What is there now stays; to look through it takes tens of milliseconds.
        asyncio.get_running_loop().add_reader(parent, gone)
        with contextlib.suppress(OSError):  # then it is gone, and that is what is read
            parent.send(READY)

    server = Server(service, on_ready=ready, drain_seconds=start.drain_seconds)
    server.run(sockets=[socket.socket(fileno=start.listener)])
    if orphaned:
        shutil.rmtree(start.description.folder, ignore_errors=True)
    return int(orphaned)


if __name__ == "__main__":
    try:
        sys.exit(main(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Start)))
    except MegakernelError as e:
        sys.exit(f"megakernel: error: {e}")
