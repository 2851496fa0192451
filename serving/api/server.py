"""The process around the application: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from ...errors import MegakernelError
from ..async_engine import Overloaded
from .app import create_app
from .protocol import Protocol
from .service import Service

_BACKLOG = 4096
_IDLE = 75  # seconds that an idle connection is kept: longer than the pools of clients and proxies keep theirs
_UNREAD = 60_000  # ms after which a connection is dropped whose client reads nothing


def listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises MegakernelError where it cannot be had."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD)
        sock.bind(address)
    except OSError as e:
        raise MegakernelError(f"cannot listen on {host} port {port}: {e.strerror or e}; take another --port") from e
    return sock


def url(sock: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until a signal, then finishes what it has begun; a second signal ends the process at once.

    `on_ready` is called when connections are accepted, `on_drain` with the signal's name when it stops accepting. What
    is not finished `drain_seconds` later gets a 503.
    """

    def __init__(
        self, service: Service, *, on_ready: Callable[[], None], on_drain: Callable[[str], None], drain_seconds: float
    ) -> None:
        config = uvicorn.Config(
            create_app(service),
            http=Protocol,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE,
        )
        super().__init__(config)
        self.ended_by: signal.Signals | None = None
        self._service, self._on_ready, self._on_drain = service, on_ready, on_drain
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        over = Overloaded("the server shuts down: ask another one")
        timer = loop.call_later(self._drain_seconds, self._service.engine.fail_all, over)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal that ended the server is not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in wanted}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.ended_by = signal.Signals(sig)
        self.should_exit = True
        self._on_drain(self.ended_by.name)


def allow_connections() -> None:
    """Raise this process's limit of open files, which is often 1,024, to what it may be."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
