"""Starts a server's frontends, the processes that serve HTTP, replaces those that die, and ends them all."""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import FrameType

import msgspec

from megakernel.errors import MegakernelError
from megakernel.serving.server.frontend import READY
from megakernel.serving.server.service import Start

log = logging.getLogger(__name__)

_DIED = b"D"  # sent to `run` when the engine has died
_GRACE = 5.0  # seconds after the time for running requests until frontends that have not ended are killed


@dataclass(eq=False)
class _Frontend:
    start: Start
    process: subprocess.Popen[bytes]
    line: socket.socket  # connection to the process; the operating system closes it when the process ends
    ready: bool = False


@dataclass(eq=False)
class Frontends:
    """The frontends of a server, the processes that serve HTTP. `count` processes accept connections from
    `listener`."""

    listener: socket.socket
    count: int
    start: Start  # their common configuration
    on_gone: Callable[[str], None]  # called with the identity of each frontend that has ended
    on_ready: Callable[[], None]  # called when all frontends accept connections
    # Called with the name of the signal that ends the server. From then on, frontends only finish their requests.
    on_drain: Callable[[str], None]
    ended_by: signal.Signals | None = None
    _running: list[_Frontend] = field(default_factory=list)
    _draining: bool = False
    _failed: str = ""
    _made: int = 0
    _said_ready: bool = False
    _kill_at: float = float("inf")

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)

    def engine_died(self) -> None:
        """Tell `run` that the engine has died. The frontends end after they have answered their clients with an error.
        Any thread may call this method."""
        self._waker.send(_DIED)

    def run(self) -> None:
        """Start all frontends and wait until they have ended. Raises MegakernelError if they end for another reason
        than a signal."""
        with self._signals():
            try:
                for number in range(1, self.count + 1):
                    self._spawn(number)
                while self._running:
                    left = self._kill_at - monotonic()
                    for key, _ in self._selector.select(None if left == float("inf") else max(0.0, left)):
                        self._wakened() if key.fileobj is self._wake else self._heard(key.data)
                    if monotonic() >= self._kill_at:
                        log.error("a frontend process did not end in time: it is killed")
                        break
            finally:
                for frontend in self._running:
                    frontend.process.kill()
                    frontend.process.wait()
        if self._failed:
            raise MegakernelError(self._failed)

    def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        self._made += 1
        start = msgspec.structs.replace(
            self.start, number=number, identity=f"frontend-{self._made}", parent=theirs.fileno()
        )
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megakernel.serving.server.frontend"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(start.listener, start.parent),
            env=os.environ | {"PYTHONPATH": path},
            process_group=0,  # Ctrl-C must reach only the server's main process
        )
        theirs.close()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.msgpack.encode(start))
            process.stdin.close()
        except BrokenPipeError:
            pass  # the process has died; `_heard` will notice that its connection is closed
        frontend = _Frontend(start, process, ours)
        self._running.append(frontend)
        self._selector.register(ours, selectors.EVENT_READ, frontend)

    def _heard(self, frontend: _Frontend) -> None:
        try:
            said = frontend.line.recv(1)
        except OSError:
            said = b""
        if said == READY:
            frontend.ready = True
            if not self._said_ready and all(other.ready for other in self._running):
                self._said_ready = True
                self.on_ready()
            return
        self._selector.unregister(frontend.line)
        frontend.line.close()
        status = frontend.process.wait()
        self._running.remove(frontend)
        self.on_gone(frontend.start.identity)
        if self._draining:
            return
        if frontend.ready:
            log.error("a frontend process ended with status %d; starting another one", status)
            self._spawn(frontend.start.number)
        else:
            self._failed = (
                f"a frontend process ended with status {status} before it accepted connections: see its messages above"
            )
            self._drain()

    def _wakened(self) -> None:
        said = self._wake.recv(1)
        if said == _DIED:
            self._failed = "the engine has stopped: the reason is in the log above"
        if not self._draining:
            if self.ended_by:
                self.on_drain(self.ended_by.name)
            self._drain()

    def _drain(self) -> None:
        """Stop accepting connections and send SIGTERM to all frontends, which then finish their requests."""
        self._draining = True
        self._kill_at = monotonic() + self.start.drain_seconds + _GRACE
        self.listener.close()
        for frontend in self._running:
            frontend.process.terminate()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self._signalled) for sig in wanted}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.ended_by:
            for frontend in self._running:
                frontend.process.kill()
            shutil.rmtree(self.start.description.folder, ignore_errors=True)
            os._exit(128 + number)
        self.ended_by = signal.Signals(number)
        self._waker.send(b"S")
