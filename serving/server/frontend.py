"""The frontend process: `python -m megakernel.serving.server.frontend`. It reads its configuration, a `Start`, from
standard input. The process ends on SIGTERM, or when its parent process has ended."""

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

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megakernel.errors import MegakernelError
from megakernel.serving.server.app import create_app
from megakernel.serving.server.client import Overloaded
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.limits import AccessRules, Limits
from megakernel.serving.server.messages import Description
from megakernel.serving.server.service import Service
from megakernel.serving.text.codec import Codec

_BACKLOG = 4096
# Seconds until an idle connection is closed: longer than clients and proxies usually keep one, so they close it first.
_IDLE = 75
_UNREAD = 60_000  # milliseconds until a connection is dropped if the client does not read its answer
_MOST_HEAD = 1 << 16  # maximum bytes of a request's header: of its request line and all header fields
# A header field counts as so many bytes more, as in HTTP/2, because short ones take as long to parse as long ones.
_FIELD = 32
# New objects that trigger a garbage collection. Python's default is 700. With 50,000, one paused requests for 95 ms.
_GC_THRESHOLD = 5_000
READY = b"R"  # the message of a frontend to its parent when the frontend accepts connections

# uvicorn warns about every request that is not valid HTTP, so any client could fill the log.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class Start(msgspec.Struct, frozen=True):
    """The configuration that a frontend gets from its parent."""

    description: Description
    number: int  # index of the frontend's row on the board, the counters in shared memory
    identity: str  # name of the frontend in its messages to the engine
    names: list[str] | None
    access: AccessRules
    limits: Limits
    drain_seconds: float
    log_level: int
    listener: int  # file descriptor of the listening socket that all frontends share
    parent: int  # file descriptor of a socket whose other end closes when the parent ends
    tool_parser: str | None = None  # name of the model's tool call format; None: the chat template decides


def listen(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; the system chooses port 0. Raises MegakernelError if the address cannot be bound."""
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


def allow_connections() -> None:
    """Raise this process's limit of open files from the soft limit, often 1,024, to the hard limit."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _HeadTooLarge(Exception):
    pass


class HttpProtocol(HttpToolsProtocol):
    """The HTTP/1.1 protocol of one connection, with errors as JSON and a limit on the size of a header. It closes the
    connection if no complete header arrives within `timeout_keep_alive` seconds. The time counts from the end of the
    last answer, or from the beginning of a new connection."""

    _head = 0  # bytes of the current header so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # Hide the timer from uvicorn's own method, which would cancel it at the first byte of a header.
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        # If no answer is pending, the header is incomplete, or this is the rest of a refused body: the timer continues.
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = waiting
        else:
            waiting.cancel()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _FIELD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head = 0

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > _MOST_HEAD:
            raise _HeadTooLarge

    def send_400_response(self, msg: str) -> None:
        body = APIError(400, f"the request is not valid HTTP, or its header is larger than {_MOST_HEAD} bytes").body()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


class FrontendServer(uvicorn.Server):
    """The server of one frontend. It serves until the process gets SIGTERM or `end` is called, and then finishes its
    requests. `on_ready` is called on the event loop when connections are accepted. Requests that are not finished
    `drain_seconds` after the shutdown began get a 503."""

    def __init__(self, service: Service, *, on_ready: Callable[[], None], drain_seconds: float) -> None:
        config = uvicorn.Config(
            create_app(service),
            http=HttpProtocol,
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


def main(start: Start) -> int:
    """Serve until SIGTERM or until the parent ends. Returns the exit status."""
    logging.basicConfig(level=start.log_level, format="megakernel: %(levelname)s: %(message)s")
    allow_connections()
    parent = socket.socket(fileno=start.parent)
    codec = Codec.of(start.description.name, start.description.source, start.tool_parser)
    service = Service(start.description, codec, start.number, start.identity, start.names, start.access, start.limits)
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

    server = FrontendServer(service, on_ready=ready, drain_seconds=start.drain_seconds)
    server.run(sockets=[socket.socket(fileno=start.listener)])
    if orphaned:
        shutil.rmtree(start.description.folder, ignore_errors=True)
    return int(orphaned)


if __name__ == "__main__":
    try:
        sys.exit(main(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Start)))
    except MegakernelError as e:
        sys.exit(f"megakernel: error: {e}")
