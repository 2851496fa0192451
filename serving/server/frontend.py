"""A frontend: a process that serves HTTP and passes requests to the engine's process. `python -m
megakernel.serving.server.frontend` starts it. It reads its configuration, a `Start`, from standard input, and ends on
SIGTERM or with its parent process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvicorn

from megakernel.errors import MegakernelError
from megakernel.model.chat_template import ChatTemplate
from megakernel.serving.server.client import Overloaded
from megakernel.serving.server.http import log as request_log
from megakernel.serving.server.protocol import HttpProtocol
from megakernel.serving.server.service import Service, Start
from megakernel.serving.text.codec import Codec

_BACKLOG = 4096
# Seconds until an idle connection is closed: longer than clients and proxies usually keep one, so they close it first.
_IDLE = 75
# Milliseconds until a connection is closed if the client does not read its answer.
_UNREAD = 60_000
# After so many new objects, Python collects garbage. Its default of 700 is too low; at 50,000, a collection took 95 ms.
_GC_THRESHOLD = 5_000
READY = b"R"  # a frontend sends this to its parent process when it accepts connections


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on `host` and `port`; for port 0, the operating system chooses a free port. It
    listens at once, because two sockets may be bound to one address until one of them listens. Raises MegakernelError
    if another server has the address."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as e:
        raise MegakernelError(f"cannot listen on {host} port {port}: {e.strerror or e}: choose another --port") from e
    return sock


def listen_on_path(path: str) -> socket.socket:
    """Return a Unix socket that listens. It replaces a socket on which nobody listens any more. Raises MegakernelError
    if the path cannot be bound."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
                probe.connect(path)
                raise OSError("another server listens there")
            Path(path).unlink()
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as e:
        raise MegakernelError(f"cannot listen on {path}: {e.strerror or e}: choose another --uds") from e
    return sock


def url(sock: socket.socket, scheme: str = "http") -> str:
    """Return the server's URL for clients on this machine."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def allow_connections() -> None:
    """Raise this process's limit of open files from the soft limit, often 1,024, to the hard limit."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class FrontendServer(uvicorn.Server):
    """The HTTP server of one frontend process. It serves until SIGTERM or until `end` is called, and then finishes its
    requests. `on_ready` is called on the event loop when connections are accepted. Requests that are not finished
    `drain_seconds` after the shutdown began get a 503."""

    def __init__(self, start: Start, service: Service, on_ready: Callable[[], None]) -> None:
        # FastAPI takes a second to import. Only frontends need it, and the engine's process starts meanwhile.
        from megakernel.serving.server.app import create_app

        config = uvicorn.Config(
            create_app(service, start.root_path),
            http=HttpProtocol,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE,
            ssl_keyfile=start.tls[0] if start.tls else None,
            ssl_certfile=start.tls[1] if start.tls else None,
        )
        super().__init__(config)
        self._service, self._on_ready, self._drain_seconds = service, on_ready, start.drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        self._service.metrics.row.count_cpu()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        over = Overloaded("the server is shutting down: send the request to another server")
        timer = loop.call_later(self._drain_seconds, self._service.engine.fail_all, over)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle only the signal SIGTERM. uvicorn's own method would also raise the signal again after the shutdown."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: self.end())
        yield

    def end(self) -> None:
        self.should_exit = True


def main(start: Start) -> int:
    """Serve until SIGTERM or until the parent ends. Returns the exit status."""
    logging.basicConfig(level=start.log_level, format="megakernel: %(levelname)s: %(message)s")
    request_log.disabled = not start.log_requests
    allow_connections()
    parent = socket.socket(fileno=start.parent)
    codec = Codec.of(start.description.name, start.description.source, start.tool_parser)
    if codec.tokenizer and start.chat_template is not None:
        codec.tokenizer.set_chat_template(ChatTemplate(start.chat_template, "--chat-template"))
    service = Service(start, codec)
    # Collect garbage less often: the objects that each token needs form no cycles, so they are freed without it.
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
        # Exempt the present objects from garbage collection: they stay alive, and scanning them takes tens of ms.
        gc.freeze()
        asyncio.get_running_loop().add_reader(parent, gone)
        with contextlib.suppress(OSError):  # if the parent has ended, `gone` handles that
            parent.send(READY)

    server = FrontendServer(start, service, ready)
    server.run(sockets=[socket.socket(fileno=start.listener)])
    if orphaned:
        shutil.rmtree(start.description.folder, ignore_errors=True)
    return int(orphaned)


if __name__ == "__main__":
    try:
        sys.exit(main(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Start)))
    except MegakernelError as e:
        sys.exit(f"megakernel: error: {e}")
