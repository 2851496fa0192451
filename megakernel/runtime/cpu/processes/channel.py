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
    """The process at the other end has ended."""


@dataclass(frozen=True)
class Open:
    """From the driver: make the executor of rank `rank`, for a model with the sizes `dims`.
    Descriptor: the Board.

    `config` has the fields of the model's ModelConfig except `rope`. `storage` is the checkpoint's:
    for each buffer and layer, a list of parts, each with its type and number of rows.
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
    """From the driver: a weight is in the staging memory (shared memory for weights on their way to
    the ranks), as arrays of these types and shapes, one after another from its start.

    If the weight's rows keep the types of the checkpoint's file, `kinds` has the Dtype of each
    array. Descriptor: the staging memory, if it is new.
    """

    buffer: int
    layer: int
    dtypes: list[str]
    shapes: list[list[int]]
    kinds: list[int]


@dataclass(frozen=True)
class Place:
    """From the driver: the byte offsets and shapes of buffers that move to new shared memory.
    Descriptors: this memory, one file per rank.
    """

    buffers: list[int]
    offsets: list[int]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Load:
    """From the driver: load program `index`. Descriptor: the program's shared memory, which begins
    with the step table.

    All ranks' counters begin at byte `counters` of this memory. The program itself begins at byte
    `start` and has `size` bytes.
    """

    index: int
    counters: int
    start: int
    size: int


@dataclass(frozen=True)
class Launch:
    """From the driver: execute program `index` with the step table in its memory."""

    index: int
    trace: bool


@dataclass(frozen=True)
class Reset:
    """From the driver: every rank has stopped; reset the counters of program `index`."""

    index: int


@dataclass(frozen=True)
class Delay:
    """From the driver: stall an instruction in every traced launch, for tests of the trace."""

    segment: int
    record: int
    layer: int
    seconds: float


@dataclass(frozen=True)
class Measure:
    """From the driver: answer `rounds` clock readings through the board."""

    rounds: int


@dataclass(frozen=True)
class Close:
    """From the driver: release the executor."""


@dataclass(frozen=True)
class Done:
    """From a rank: the last message has been processed."""


@dataclass(frozen=True)
class Ended:
    """From a rank: the launch is over. `link_bytes` is the number of bytes that the rank has stored
    on other ranks since its process started. Descriptor: the intervals, if the launch was traced.
    """

    link_bytes: int
    intervals: int
    dropped: int


@dataclass(frozen=True)
class Failed:
    """From a rank: it could not process the last message. `why` is the reason, in a sentence."""

    why: str


Message = Open | Weight | Place | Load | Launch | Reset | Delay | Measure | Close | Done | Ended | Failed
_TYPES: dict[str, type[Any]] = {t.__name__: t for t in get_args(Message)}


class Channel:
    """One end of a connection between two processes of the same user on one machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise PermissionError(f"process {self.pid} at the other end belongs to another user, {uid}")

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
        """The next message and its descriptors, which the caller must close. Raises Gone if the other end is closed."""
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
    """The descriptors among `files` that have data or have closed within `seconds` (None: no limit)."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
