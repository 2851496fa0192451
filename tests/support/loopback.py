"""A web server on the loopback address, for tests that need an HTTP server with answers that the test chooses."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    status: int = 200
    body: bytes | Iterable[bytes] = b""  # either the whole, or pieces that are chunks as HTTP sends them
    headers: dict[str, str] = field(default_factory=dict)
    stop_after: int | None = None  # close the connection after this many bytes of the body


@contextmanager
def loopback(answer: Callable[[BaseHTTPRequestHandler], Answer | None]) -> Iterator[str]:
    """Run the server within a `with` block and yield its address. If `answer` gives None, the connection closes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # the body would wait until the head was acknowledged

        def do_GET(self) -> None:
            given = answer(self)
            if given is None:
                self.close_connection = True
                return
            self.send_response(given.status)
            whole = [given.body] if isinstance(given.body, bytes) else None
            length = {"Content-Length": str(len(whole[0]))} if whole else {"Transfer-Encoding": "chunked"}
            for key, value in {**given.headers, **length}.items():
                self.send_header(key, value)
            self.end_headers()
            self.close_connection |= given.stop_after is not None
            for piece in whole or given.body:
                self.wfile.write(b"" if self.command == "HEAD" else piece[: given.stop_after])

        do_HEAD = do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
