"""The messages between the driver (rank 0) and the other ranks' processes. Messages are small and
typed, and they may carry file descriptors of shared memory.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

# Large data travels through shared memory, so messages stay far below a socket's limit.
_MOST_BYTES, _MOST_FDS = 1 << 16, 64


class Gone(Exception):
    """Raised when the process at the other end has ended."""


@dataclass(frozen=True)
class Open:
    """The driver asks a rank to create its executor, for a model with the sizes `dims`. The message
    carries the file descriptor of the Board, a small memory that all ranks share.

    `rank` is the rank's number. `config` has the fields of the model's ModelConfig except `rope`. `storage` describes
    how the checkpoint stores its weights: for each buffer and layer, a list of parts, each with its type and number of
    rows.
    """

    rank: int
    model: str
    config: dict[str, Any]
    storage: dict[str, list[list[list[int]]]]
    dims: dict[str, Any]
    pages: int
    threads: int
    null: bool
    deadlock_s: float
    audit: bool


@dataclass(frozen=True)
class Weight:
    """The driver has put a weight into the staging memory, which is shared memory for weights on their
    way to the ranks. The weight consists of arrays of these types and shapes, one after another from
    the start of that memory.

    If the weight's rows keep the types of the checkpoint's file, `kinds` has the Dtype of each
    array. The message carries the file descriptor of the staging memory if that memory is new.
    """

    buffer: int
    layer: int
    dtypes: list[str]
    shapes: list[list[int]]
    kinds: list[int]


@dataclass(frozen=True)
class Place:
    """The driver moves buffers to new shared memory, at these byte offsets and with these shapes. The
    message carries the file descriptors of this memory, one per rank.
    """

    buffers: list[int]
    offsets: list[int]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Load:
    """The driver asks a rank to load program `index`. The message carries the file descriptor of the
    program's shared memory, which begins with the step table.

    All ranks' counters begin at byte `counters` of this memory. The program itself begins at byte
    `start` and has `size` bytes.
    """

    index: int
    counters: int
    start: int
    size: int


@dataclass(frozen=True)
class Launch:
    """The driver asks a rank to execute program `index` with the step table in the program's memory."""

    index: int
    trace: bool


@dataclass(frozen=True)
class Reset:
    """The driver asks a rank to reset the counters of program `index`. By then every rank has stopped."""

    index: int


@dataclass(frozen=True)
class Delay:
    """The driver asks a rank to stall an instruction in every traced launch, for tests of the trace."""

    segment: int
    record: int
    layer: int
    seconds: float


@dataclass(frozen=True)
class Measure:
    """The driver asks a rank to answer `rounds` clock readings through the Board (shared memory)."""

    rounds: int


@dataclass(frozen=True)
class Close:
    """The driver asks a rank to release its executor."""


@dataclass(frozen=True)
class Done:
    """A rank has processed the driver's last message."""


@dataclass(frozen=True)
class Ended:
    """A rank has finished its launch. `link_bytes` is the number of bytes that the rank has stored on
    other ranks since its process started. If the launch was traced, the message carries the file
    descriptor of the recorded intervals.
    """

    link_bytes: int
    intervals: int
    dropped: int


@dataclass(frozen=True)
class Failed:
    """A rank could not process the driver's last message. `why` is the reason, in a sentence."""

    why: str


Message = Open | Weight | Place | Load | Launch | Reset | Delay | Measure | Close | Done | Ended | Failed
_TYPES: dict[str, type[Any]] = {t.__name__: t for t in get_args(Message)}


class Channel:
    """One end of a connection between two processes of the same user on one machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise PermissionError(
                f"process {self.pid} at the socket's other end belongs to another user, with id {uid}"
            )

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises Gone if the other end has closed. The descriptors stay open here."""
        data = json.dumps([type(message).__name__, asdict(message)]).encode()
        if len(data) > _MOST_BYTES:
            raise ValueError(f"a {type(message).__name__} of {len(data)} bytes is too large for a control message")
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def receive(self) -> tuple[Message, list[int]]:
        """Wait for the next message, and return it with its descriptors, which the caller must close. Raises Gone if
        the other end is closed.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise Gone from None
        if not data:
            raise Gone
        name, values = json.loads(data)
        kind = _TYPES[name]
        return kind(**{f.name: values[f.name] for f in fields(kind)}), descriptors

    def close(self) -> None:
        self._socket.close()


def ready(files: Sequence[int], seconds: float | None) -> set[int]:
    """Wait at most `seconds` (None: no limit), and return those of `files` that have data or have closed."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
