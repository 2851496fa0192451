"""A web server on the loopback address, for tests that need an HTTP server with answers that the test chooses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stop_after: int | None = None  # close the connection after this many bytes of the body


@contextmanager
def loopback(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Iterator[str]:
    """Run the server within a `with` block and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = answer(self)
            self.send_response(given.status)
            for key, value in {**given.headers, "Content-Length": str(len(given.body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(given.body[: given.stop_after])

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
