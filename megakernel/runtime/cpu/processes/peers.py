"""The processes of the other ranks, as the driver (rank 0) sees them. Either the driver or torchrun starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from ....errors import MegakernelError
from . import channel
from .channel import Channel, Close, Done, Ended, Failed, Gone, Message

_LAST_WORDS_S = 0.5  # the time that a process gets to end after its channel has closed

# After this many seconds without an answer, a rank counts as ended. The slowest answer is to a
# Weight message, because the rank first packs the tensor, which may have gigabytes.
_SILENCE_S = 120


class RankGone(MegakernelError):
    """A rank's process has ended, and its part of the KV cache is lost."""


class Peer:
    """One rank's process. `process` is None if torchrun started it."""

    def __init__(self, rank: int, connection: Channel, process: subprocess.Popen[bytes] | None) -> None:
        self.rank = rank
        self.pid = process.pid if process else connection.pid
        self._channel = connection
        self._process = process
        self._owed = 0  # answers to come
        self.gone = False
        self.last_words: Callable[[], str] = str  # returns the reason that the process wrote before it died, or ""

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding."""
        return self._owed > 0

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a request; `answer` returns its result. Raises RankGone."""
        try:
            self._channel.send(message, descriptors)
        except Gone:
            raise self._gone() from None
        self._owed += 1

    def answer(self) -> tuple[Done | Ended, list[int]]:
        """Return the next answer and its descriptors. Raises RankGone, or MegakernelError if the rank reports a
        failure.

        If the rank's process does not answer for _SILENCE_S seconds, it counts as ended. It may only have been stopped
        (SIGSTOP). Seconds in which the calling process was stopped are not counted.
        """
        if not any(channel.ready([self.fileno()], 1.0) for _ in range(_SILENCE_S)):
            raise self._gone(f"has not answered rank 0 for {_SILENCE_S} s")
        try:
            message, descriptors = self._channel.receive()
        except Gone:
            raise self._gone() from None
        self._owed -= 1
        if isinstance(message, Failed):
            raise MegakernelError(f"rank {self.rank}: {message.why}")
        assert isinstance(message, Done | Ended)
        return message, descriptors

    def _gone(self, fate: str = "") -> RankGone:
        self._owed, self.gone = 0, True
        words = self.last_words()
        return RankGone(
            f"rank {self.rank} (process {self.pid}) {fate or self._fate()}{words and f' ({words})'}: "
            + ("the next launch starts all ranks anew" if self._process else "start the job again")
        )

    def _fate(self) -> str:
        if self._process is None:
            return "has ended"
        try:
            status = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status >= 0:
            return f"ended with status {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def end(self) -> None:
        """Close the connection, which makes the rank's process end. If the driver started that
        process, this method also waits for its end, and kills it if it does not end by itself.
        """
        self._channel.close()
        if self._process is None:
            return
        try:
            self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def dismiss(self) -> None:
        """Let the rank's process release its model, and wait until it has done so. The process itself stays alive."""
        with suppress(RankGone):
            self.send(Close())
            while self.busy:
                with suppress(MegakernelError):  # earlier failures no longer matter
                    self.answer()


def spawn(rank: int) -> Peer:
    """Start a process for `rank`, with the environment and import path of this process."""
    ours, theirs = channel.pair()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megakernel.runtime.cpu.processes.rank_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
    return Peer(rank, Channel(ours), process)
