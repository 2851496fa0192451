"""What the driver and its rank processes tell each other: small typed messages, and descriptors of shared memory."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

# Large things travel through shared memory, so messages stay far below a socket's limit.
_MOST_BYTES, _MOST_FDS = 1 << 16, 64


class Gone(Exception):
    """The process at the other end has ended."""


@dataclass(frozen=True)
class Open:
    """Driver: make an executor of rank `rank` of `dims`. Descriptor: the board.

    `config` has the fields of the model's ModelConfig but for `rope`, `storage` the checkpoint's: by
    buffer and layer, (type, rows) of each part.
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
    """Driver: the staging memory holds arrays of these types and shapes from its start, one after another.

    Their elements are of `kinds`, where the rows are stored in types of their own. Descriptor, where it is new: the
    staging memory.
    """

    buffer: int
    layer: int
    dtypes: list[str]
    shapes: list[list[int]]
    kinds: list[int]


@dataclass(frozen=True)
class Place:
    """Driver: where buffers lie from now on: byte offset and shape. Descriptors: the memory, a file for each rank."""

    buffers: list[int]
    offsets: list[int]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Load:
    """Driver: program `index`. Descriptor: its memory, with the step table at its start.

    All ranks' counters lie at `counters`, and at `start` the `size` bytes of the program.
    """

    index: int
    counters: int
    start: int
    size: int


@dataclass(frozen=True)
class Launch:
    """Driver: execute program `index` on the table words in its memory."""

    index: int
    trace: bool


@dataclass(frozen=True)
class Reset:
    """Driver: every rank has stopped; make program `index` as good as new."""

    index: int


@dataclass(frozen=True)
class Delay:
    """Driver: stall an instruction of every traced launch, for tests of the trace."""

    segment: int
    record: int
    layer: int
    seconds: float


@dataclass(frozen=True)
class Measure:
    """Driver: answer `rounds` readings of the clock through the board."""

    rounds: int


@dataclass(frozen=True)
class Close:
    """Driver: release the executor."""


@dataclass(frozen=True)
class Done:
    """Rank: done with the last message."""


@dataclass(frozen=True)
class Ended:
    """Rank: the launch is over; `link_bytes` stored elsewhere since the start. Descriptor, where traced: intervals."""

    link_bytes: int
    intervals: int
    dropped: int


@dataclass(frozen=True)
class Failed:
    """Rank: why the last message could not be obeyed, in a sentence."""

    why: str


Message = Open | Weight | Place | Load | Launch | Reset | Delay | Measure | Close | Done | Ended | Failed
_TYPES: dict[str, type[Any]] = {t.__name__: t for t in get_args(Message)}


class Channel:
    """One end. Both ends belong to processes of the same user on one machine."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise PermissionError(f"process {self.pid} at the other end belongs to user {uid}")

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Raises Gone where nobody will read it. The descriptors stay open here."""
        data = json.dumps([type(message).__name__, asdict(message)]).encode()
        if len(data) > _MOST_BYTES:
            raise ValueError(f"a {type(message).__name__} of {len(data)} bytes is no control message")
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def receive(self) -> tuple[Message, list[int]]:
        """The next message and its descriptors, which belong to the caller. Raises Gone at the end."""
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
    """Descriptors among `files` at which there is something to read, or an end, within `seconds` (None: ever)."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
