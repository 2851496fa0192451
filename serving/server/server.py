"""The uvicorn server of one frontend: its listening socket, start and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from megakernel.errors import MegakernelError
from megakernel.serving.server.app import create_app
from megakernel.serving.server.client import Overloaded
from megakernel.serving.server.protocol import Protocol
from megakernel.serving.server.service import Service

_BACKLOG = 4096
# Seconds until the server closes an idle connection. This is longer than clients and proxies usually keep one, so that
# they close it first.
_IDLE = 75
_UNREAD = 60_000  # milliseconds until a connection is dropped if the client does not read its answer


def listen(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket. For port 0, the system chooses a free port.

    Raises MegakernelError if the address cannot be bound.
    """
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
        raise MegakernelError(f"cannot listen on {host} port {port}: {e.strerror or e}: choose another --port") from e
    return sock


def url(sock: socket.socket) -> str:
    """Return the server's URL for clients on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# uvicorn warns about every request that is not valid HTTP, so any client could fill the log. For this reason, only
# errors are logged.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class Server(uvicorn.Server):
    """The server of one frontend. It serves until the process gets SIGTERM or `end` is called, and then finishes its
    requests.

    `on_ready` is called on the event loop when connections are accepted. Requests that are not finished `drain_seconds`
    after the shutdown began get a 503.
    """

    def __init__(self, service: Service, *, on_ready: Callable[[], None], drain_seconds: float) -> None:
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
        self._service, self._on_ready, self._drain_seconds = service, on_ready, drain_seconds

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


def allow_connections() -> None:
    """Raise this process's limit of open files from the soft limit, often 1,024, to the hard limit."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
