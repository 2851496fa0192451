"""The frontend process: `python -m megakernel.serving.api.frontend` reads its `Start` from standard input.

It ends on SIGTERM, or when its parent process has ended.
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

# New objects until a garbage collection; Python's default is 700. With 50,000, a collection stopped
# every request for 95 ms.
_GC_THRESHOLD = 5_000
READY = b"R"  # a frontend sends it to its parent when it accepts connections


class Start(msgspec.Struct, frozen=True):
    """The configuration that a frontend gets from its parent.

    number    the frontend's row on the board of shared counters
    identity  its name in messages to the engine
    listener  file descriptor of the listening socket that all frontends share
    parent    file descriptor of a socket whose other end stays open while the parent lives
    tool_parser  name of the tool call format; None: found from the chat template
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
    """Serve until SIGTERM or until the parent ends. Returns the exit status."""
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
    gc.set_threshold(_GC_THRESHOLD)  # The objects made per token form no cycles.
    orphaned = False

    def gone() -> None:
        nonlocal orphaned
        orphaned = True
        asyncio.get_running_loop().remove_reader(parent)
        service.engine.die("the engine's process has ended: restart the server")
        server.end()

    def ready() -> None:
        gc.collect()
        gc.freeze()  # Skip the existing objects: all stay alive, and a scan takes tens of ms.
        asyncio.get_running_loop().add_reader(parent, gone)
        with contextlib.suppress(OSError):  # the parent has ended, which `gone` notices
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
