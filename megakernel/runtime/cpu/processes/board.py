"""A small memory that all rank processes share. It has the abort words, the last message of each rank, and two words
with which ranks compare their clocks."""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray

from ....errors import MegakernelError
from .shared_memory import LINE, Mapping, create

_WORDS_BYTES = 256  # size of the memory for one rank's last message
_PATIENCE_NS = 5_000_000_000


class Board:
    """The shared memory of `ranks` ranks. Each abort word and each of the two clock words has its own cache line. The
    constructor takes the file descriptor that `make` returned.
    """

    def __init__(self, ranks: int, descriptor: int) -> None:
        self._memory = Mapping(descriptor)
        lines = self._memory.array(0, np.int64, (ranks + 2, LINE // 8))
        self._abort, self._clock = lines[:ranks, 0], lines[ranks:, 0]
        self._words = self._memory.array(lines.nbytes, np.uint8, (ranks, _WORDS_BYTES))

    @staticmethod
    def make(ranks: int) -> int:
        return create("the ranks' abort words", (ranks + 2) * LINE + ranks * _WORDS_BYTES)

    def abort_word(self, rank: int) -> NDArray[np.int64]:
        """A word that ends the rank's launch when it becomes non-zero."""
        return self._abort[rank : rank + 1]

    def words_address(self, rank: int) -> tuple[int, int]:
        """Return the address and size of the memory for a rank's last message: why the rank dies."""
        return int(self._words[rank].ctypes.data), _WORDS_BYTES

    def words(self, rank: int) -> str:
        """A rank's last message; empty if there is none."""
        return bytes(self._words[rank]).rstrip(b"\0").decode()

    def abort(self) -> None:
        self._abort[:] = 1

    def clear(self) -> None:
        """Reset the abort words before a launch. No rank may be running."""
        self._abort[:] = 0

    def measure_clock(self, rounds: int) -> float:
        """Compare this process's clock with that of a process that runs `answer_clock`. Returns an
        upper bound on their difference in seconds.
        """
        ping, pong = range(2)
        least, offset = _PATIENCE_NS, 0
        for sequence in range(1, rounds + 1):
            before = time.monotonic_ns()
            self._clock[pong] = 0
            self._clock[ping] = sequence
            theirs = self._wait(pong, 0)
            after = time.monotonic_ns()
            if after - before < least:
                least, offset = after - before, theirs - (before + after) // 2
        self._clock[:] = 0
        return (abs(offset) + least / 2) * 1e-9

    def answer_clock(self, rounds: int) -> None:
        """Answer a process that runs `measure_clock`: report this process's clock `rounds` times."""
        ping, pong = range(2)
        for sequence in range(1, rounds + 1):
            self._wait(ping, sequence - 1)
            self._clock[pong] = time.monotonic_ns()

    def _wait(self, word: int, old: int) -> int:
        """Wait until a clock word differs from `old`, and return its new value."""
        deadline = time.monotonic_ns() + _PATIENCE_NS
        while (value := int(self._clock[word])) == old:
            if time.monotonic_ns() > deadline:
                raise MegakernelError("a rank does not answer: its clock cannot be compared")
            os.sched_yield()
        return value
