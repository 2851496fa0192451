"""Starts a server's frontends, the processes that serve HTTP, replaces those that die, and ends them all."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from megakernel.errors import MegakernelError
from megakernel.serving.server.frontend import READY
from megakernel.serving.server.service import Start

log = logging.getLogger(__name__)

_GRACE = 5.0  # when the time to finish requests is over, frontends that run this many seconds longer are killed


@dataclass(eq=False)
class Frontends:
    """The frontends of a server, the processes that serve HTTP. `count` processes accept the connections to
    the listening socket `listener`."""

    listener: socket.socket
    count: int
    start: Start  # their common configuration
    on_gone: Callable[[str], None]  # called with the identity of each frontend that has ended
    on_ready: Callable[[], None]  # called when all frontends accept connections
    # Called with the name of the signal, such as SIGTERM, that ends the server. Frontends then only finish requests.
    on_drain: Callable[[str], None]
    ended_by: signal.Signals | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _draining: asyncio.Event = field(default_factory=asyncio.Event)
    _processes: set[asyncio.subprocess.Process] = field(default_factory=set)
    _failed: str = ""
    _made: int = 0

    def engine_died(self) -> None:
        """Tell `run` that the engine has died. The frontends end after they have answered their clients with an error.
        Any thread may call this method."""
        with suppress(RuntimeError):  # `run` has ended
            self._loop.call_soon_threadsafe(self._drain, "the engine has stopped: the reason is in the log above")

    def run(self) -> None:
        """Start all frontends and wait until they have ended. Raises MegakernelError if they end for another reason
        than a signal."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())
        if self._failed:
            raise MegakernelError(self._failed)

    async def _run(self) -> None:
        self._awaited = set(range(1, self.count + 1))  # frontends that have not accepted connections yet
        for sig in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(sig, self._signalled, sig)
        running = asyncio.gather(*map(self._keep, range(1, self.count + 1)))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((running, draining), return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(self.start.drain_seconds + _GRACE):
                await running
        except TimeoutError:
            log.error("a frontend process did not end in time: it is killed")
        finally:
            draining.cancel()
            self._send(signal.SIGKILL)
            await asyncio.gather(*(process.wait() for process in self._processes))
            for sig in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(sig)

    async def _keep(self, number: int) -> None:
        """Run a frontend in row `number` of the board. If it dies, start another one, until the server ends."""
        while not self._draining.is_set():
            self._made += 1
            # The operating system closes our end when this process ends, and theirs when the frontend ends.
            ours, theirs = socket.socketpair()
            name, parent = f"frontend-{self._made}", theirs.fileno()
            start = msgspec.structs.replace(self.start, number=number, identity=name, parent=parent)
            path = os.pathsep.join(entry for entry in sys.path if entry)
            with ours:
                with theirs:
                    process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-P", "-m", "megakernel.serving.server.frontend"),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        pass_fds=(start.listener, start.parent),
                        env=os.environ | {"PYTHONPATH": path},
                        process_group=0,  # Ctrl-C must reach only the server's main process
                    )
                self._processes.add(process)
                assert process.stdin is not None
                process.stdin.write(msgspec.msgpack.encode(start))
                process.stdin.close()
                if self._draining.is_set():
                    process.terminate()
                ours.setblocking(False)
                ready = False
                with suppress(OSError):
                    ready = await self._loop.sock_recv(ours, 1) == READY
                if ready and number in self._awaited:
                    self._awaited.remove(number)
                    if not self._awaited:
                        self.on_ready()
                status = await process.wait()
            self._processes.discard(process)
            self.on_gone(name)
            if ready and not self._draining.is_set():
                log.error("a frontend process ended with status %d; starting another one", status)
            elif not self._draining.is_set():
                told = f"a frontend process ended with status {status} before it accepted connections"
                self._drain(f"{told}: see its messages above")

    def _drain(self, failure: str = "") -> None:
        """Stop accepting connections and send SIGTERM to all frontends, which then finish their requests."""
        self._failed = failure or self._failed
        if not self._draining.is_set():
            self._draining.set()
            self.listener.close()
            self._send(signal.SIGTERM)

    def _send(self, sig: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(sig)

    def _signalled(self, sig: signal.Signals) -> None:
        if self.ended_by:
            self._send(signal.SIGKILL)
            shutil.rmtree(self.start.description.folder, ignore_errors=True)
            os._exit(128 + sig)
        self.ended_by = sig
        if not self._draining.is_set():
            self.on_drain(sig.name)
            self._drain()
