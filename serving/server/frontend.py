"""The frontend process: `python -m megakernel.serving.server.frontend`. It reads its configuration, a `Start`, from
standard input.

The process ends on SIGTERM, or when its parent process has ended.
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

from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.serving.server.access import Access
from megakernel.serving.server.limits import Limits
from megakernel.serving.server.messages import Description
from megakernel.serving.server.server import Server, allow_connections
from megakernel.serving.server.service import Service

# The number of new objects that triggers a garbage collection. Python's default is 700. With 50,000, one collection
# paused every request for 95 ms.
_GC_THRESHOLD = 5_000
READY = b"R"  # the message of a frontend to its parent when the frontend accepts connections


class Start(msgspec.Struct, frozen=True):
    """The configuration that a frontend gets from its parent.

    number       index of the frontend's row on the board, the counters in shared memory
    identity     name of the frontend in its messages to the engine
    listener     file descriptor of the listening socket that all frontends share
    parent       file descriptor of a socket whose other end closes when the parent ends
    tool_parser  name of the model's tool call format; if None, the chat template determines the format
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
    # Collect garbage less often, because the objects that each token needs form no cycles.
    gc.set_threshold(_GC_THRESHOLD)
    orphaned = False

    def gone() -> None:
        nonlocal orphaned
        orphaned = True
        asyncio.get_running_loop().remove_reader(parent)
        service.engine.die("the engine's process has ended: restart the server")
        server.end()

    def ready() -> None:
        gc.collect()
        # Exempt the existing objects from collection, because they stay alive and scanning them takes tens of ms.
        gc.freeze()
        asyncio.get_running_loop().add_reader(parent, gone)
        with contextlib.suppress(OSError):  # If the parent has ended, the event loop calls `gone`.
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
