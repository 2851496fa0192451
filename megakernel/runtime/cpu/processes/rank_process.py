"""A process that executes one rank of every launch and otherwise waits for the driver's messages."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import astuple
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ....errors import MegakernelError
from ....isa import Buffer, Dims, Dtype
from ....model.checkpoint import Part, Rows, Storage, cut
from ....model.config import ModelConfig
from . import channel
from .board import Board
from .channel import Channel, Done, Gone
from .rank_executor import RankExecutor
from .shared_memory import Mapping, create


class _Closed(Exception):
    """Raised when the driver gives up while this process opens the model."""


class Incoming:
    """A Checkpoint whose tensors come from the driver, in the order in which a backend requests them."""

    dtype: Dtype

    def __init__(self, connection: Channel, message: channel.Open) -> None:
        self.name = message.model
        self.dtype = Dtype(message.dims["dtype"])
        self.storage = {
            Buffer[name]: Storage(tuple(tuple(Part(Dtype(kind), rows) for kind, rows in layer) for layer in layers))
            for name, layers in message.storage.items()
        }
        self.config = ModelConfig(**message.config)
        self._channel = connection
        self._staging: Mapping | None = None
        self._owes = False  # whether the driver still waits for permission to overwrite the staging memory

    def rows(self, buffer: Buffer, layer: int, split: Dims) -> list[Rows]:
        """Receive all rows of a weight, and return this rank's as views that are valid until the next call."""
        arrays, kinds = self._receive(buffer, layer)
        return cut(
            [Rows(Dtype(kind), array.view(np.uint8)) for kind, array in zip(kinds, arrays, strict=True)], buffer, split
        )

    def _receive(self, buffer: Buffer, layer: int) -> tuple[list[NDArray[np.generic]], list[int]]:
        """Receive a weight, and return its arrays and the types of their elements."""
        while True:
            self.release()
            message, descriptors = self._channel.receive()
            if isinstance(message, channel.Close):
                raise _Closed
            assert isinstance(message, channel.Weight)
            if descriptors:
                self._staging = Mapping(descriptors[0])
            assert self._staging is not None
            self._owes = True
            if (message.buffer, message.layer) == (buffer, layer):
                arrays, begin = [], 0
                for dtype, shape in zip(message.dtypes, message.shapes, strict=True):
                    arrays.append(self._staging.array(begin, dtype, tuple(shape)))
                    begin += arrays[-1].nbytes
                return arrays, message.kinds

    def release(self) -> None:
        """Let the driver overwrite the last tensor."""
        if self._owes:
            self._channel.send(Done())
            self._owes = False


class _Server:
    """Processes the driver's messages, and keeps the state that results from them: the open model, if any."""

    def __init__(self, connection: Channel) -> None:
        self._channel = connection
        self._executor: RankExecutor | None = None
        self._board: Board | None = None
        try:
            self._driver = [os.pidfd_open(connection.pid)]
        except ProcessLookupError:
            raise Gone from None
        except OSError:
            self._driver = []  # Linux without pidfd: only the connection shows that the driver ended

    @property
    def idle(self) -> bool:
        """Whether no model is open."""
        return self._executor is None

    def run(self) -> NoReturn:
        """Process messages until the driver ends, then raise Gone."""
        while True:
            self._heed(None)
            message, descriptors = self._channel.receive()
            try:
                self._channel.send(*self._obey(message, descriptors))
            except _Closed:
                self._channel.send(channel.Failed("the driver gave up"))  # this answers the message Open
                self._channel.send(Done())
            except MegakernelError as e:
                self._channel.send(channel.Failed(str(e)))

    def _heed(self, seconds: float | None) -> bool:
        """Wait at most `seconds` (None: no limit) for a message, and return whether there is one.
        Raises Gone if the driver has ended.
        """
        found = channel.ready([self._channel.fileno(), *self._driver], seconds)
        if any(fd in found for fd in self._driver):
            raise Gone
        return bool(found)

    def _obey(self, message: channel.Message, descriptors: list[int]) -> tuple[channel.Message, list[int]]:
        if isinstance(message, channel.Open):
            self._open(message, descriptors[0])
            return Done(), []
        if isinstance(message, channel.Weight):
            return Done(), []  # this rank needs no part of the buffer
        if isinstance(message, channel.Close):
            self.close()
            return Done(), []
        assert self._executor is not None and self._board is not None
        match message:
            case channel.Place() | channel.Load():
                self._executor.take(message, descriptors)
            case channel.Launch():
                return self._launch(self._executor, message)
            case channel.Reset():
                self._executor.reset(message)
            case channel.Delay():
                self._executor.ranks.delay(*astuple(message))
            case channel.Measure():
                self._board.answer_clock(message.rounds)
        return Done(), []

    def _open(self, message: channel.Open, board: int) -> None:
        self.close()
        self._board = Board(Dims(**message.dims).tp, board)
        weights = Incoming(self._channel, message)
        self._executor = RankExecutor(message, weights, self._board)
        weights.release()

    def _launch(self, executor: RankExecutor, message: channel.Launch) -> tuple[channel.Message, list[int]]:
        executor.start(message)
        while not executor.poll():
            if self._heed(0.0):
                raise Gone  # the driver sends nothing during a launch, so the connection has closed
        if not message.trace:
            return channel.Ended(executor.link_bytes, 0, 0), []
        intervals, dropped = executor.ranks.intervals()
        memory = create("a trace", intervals.nbytes)
        Mapping(os.dup(memory)).array(0, intervals.dtype, intervals.shape)[:] = intervals
        return channel.Ended(executor.link_bytes, len(intervals), dropped), [memory]

    def close(self) -> None:
        if self._executor is not None:
            self._executor.ranks.close()
        self._executor = self._board = None


def serve(connection: Channel) -> bool:
    """Process the driver's messages until the driver ends. Returns whether the driver had closed
    its model before it ended.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    try:
        server = _Server(connection)
    except Gone:
        return False
    try:
        server.run()
    except Gone:
        return server.idle
    finally:
        server.close()


def main() -> int:
    """The main function of a process that the driver started with one end of a connection."""
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
