"""One rank of a model in its own process: the native library with private memory, the rank's heap, and mappings of the
other ranks' heaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....errors import MegakernelError
from ....isa import Dims, StepTable
from ....model.checkpoint import Checkpoint
from ....program import Program, program_from_bytes
from ..audit import audit
from ..ranks import COUNTER_BYTES, CpuRanks
from .board import Board
from .channel import Launch, Load, Open, Place, Reset
from .heaps import SHARED, Heaps
from .shared_memory import Mapping


@dataclass(frozen=True)
class _Loaded:
    program: Program
    handle: int
    words: NDArray[np.int32]  # the words of the step table


class RankExecutor:
    """Executes the driver's messages for one rank. The driver itself uses a RankExecutor for rank 0."""

    def __init__(self, message: Open, checkpoint: Checkpoint, board: Board) -> None:
        dims = Dims(**message.dims)
        self._rank, self._audit = message.rank, message.audit
        self.ranks = CpuRanks(
            checkpoint,
            dims,
            message.pages,
            range(message.rank, message.rank + 1),
            threads=message.threads,
            null=message.null,
            deadlock_s=message.deadlock_s,
            bound=SHARED,
            abort=board.abort_word(message.rank),
        )
        self.heaps = Heaps(dims)
        self._running: _Loaded | None = None
        if self._audit:
            self.ranks.audit(board.words_address(message.rank) if message.rank else None)
        self._programs: dict[int, _Loaded] = {}

    def take(self, message: Place | Load, descriptors: Sequence[int]) -> None:
        """Map new shared memory."""
        if isinstance(message, Load):
            self._load(message, Mapping(descriptors[0]))
            return
        files = [Mapping(fd, window=self._audit and rank != self._rank) for rank, fd in enumerate(descriptors)]
        for buffer in self.heaps.place(message, files):
            for rank in range(len(files)):
                self.ranks.bind(rank, buffer, self.heaps.array(buffer, rank)[None])
        for rank, file in enumerate(files):
            if self._audit and rank != self._rank:
                self.ranks.watch(file.address, file.size)

    def _load(self, message: Load, file: Mapping) -> None:
        program = program_from_bytes(file.array(message.start, np.uint8, (message.size,)).tobytes(), "of the driver")
        self.ranks.fit(program.dims)
        counters = file.array(message.counters, np.uint8, (program.ranks, program.total_counters * COUNTER_BYTES))
        words = file.array(0, np.int32, (len(StepTable(program.dims).words),))
        self._programs[message.index] = _Loaded(program, self.ranks.load(program, counters), words)

    def start(self, message: Launch) -> None:
        """Begin a launch with the present contents of the step table."""
        self._running = self._programs[message.index]
        self.ranks.start(self._running.handle, self._running.words, message.trace)

    def poll(self) -> bool:
        """Wait for one time slice, and return whether the launch has ended. Raises MegakernelError
        if it was stopped.
        """
        try:
            if not self.ranks.wait():
                return False
        except MegakernelError:
            self._running = None
            raise
        ended, self._running = self._running, None
        if self._audit and ended:
            table = StepTable(ended.program.dims, ended.words)
            audit(ended.program, table, self.ranks.stores(), self.heaps.locate)
        return True

    def reset(self, message: Reset) -> None:
        self.ranks.reset(self._programs[message.index].handle)
        if self._audit:
            self.ranks.stores()  # discard the recorded stores of the failed launch

    @property
    def link_bytes(self) -> int:
        return self.ranks.link_bytes(self._rank)
