"""One rank of a model in its process: the native library on private memory, the rank's heap and windows to others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....errors import MegakernelError
from ....isa import Dims, StepTable
from ....model.checkpoint import Checkpoint
from ....program import Program
from ....trace import Intervals
from ..audit import audit
from ..ranks import COUNTER_BYTES, CpuRanks
from .board import Board
from .channel import Delay, Launch, Load, Open, Place, Reset
from .heaps import SHARED, Heaps
from .shared_memory import Mapping


@dataclass(frozen=True)
class _Loaded:
    program: Program
    handle: int
    words: NDArray[np.int32]  # of the step table


class RankExecutor:
    """What a rank does in answer to the driver's messages; the same in the driver, for rank 0."""

    def __init__(self, message: Open, checkpoint: Checkpoint, board: Board) -> None:
        dims = Dims(**message.dims)
        self._rank, self._audit = message.rank, message.audit
        self._ranks = CpuRanks(
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
            self._ranks.audit(board.words_address(message.rank) if message.rank else None)
        self._programs: dict[int, _Loaded] = {}

    def take(self, message: Place | Load, descriptors: Sequence[int]) -> None:
        """Use new shared memory."""
        if isinstance(message, Load):
            self._load(message, Mapping(descriptors[0]))
            return
        files = [Mapping(fd, window=self._audit and rank != self._rank) for rank, fd in enumerate(descriptors)]
        for buffer in self.heaps.place(message, files):
            for rank in range(len(files)):
                self._ranks.bind(rank, buffer, self.heaps.array(buffer, rank)[None])
        for rank, file in enumerate(files):
            if self._audit and rank != self._rank:
                self._ranks.watch(file.address, file.size)

    def _load(self, message: Load, file: Mapping) -> None:
        program = Program.from_bytes(file.array(message.start, np.uint8, (message.size,)).tobytes(), "of the driver")
        self._ranks.fit(program.dims)
        counters = file.array(message.counters, np.uint8, (program.ranks, program.total_counters * COUNTER_BYTES))
        words = file.array(0, np.int32, (len(StepTable(program.dims).words),))
        self._programs[message.index] = _Loaded(program, self._ranks.load(program, counters), words)

    def start(self, message: Launch) -> None:
        """Begin a launch with what the step table's words are now."""
        self._running = self._programs[message.index]
        self._ranks.start(self._running.handle, self._running.words, message.trace)

    def poll(self) -> bool:
        """Whether the launch has ended within a slice. Raises MegakernelError where it was stopped."""
        try:
            if not self._ranks.wait():
                return False
        except MegakernelError as e:
            self._running = None
            raise MegakernelError(f"the launch made no progress and was stopped: {e}") from None
        ended, self._running = self._running, None
        if self._audit and ended:
            table = StepTable(ended.program.dims, ended.words)
            audit(ended.program, table, self._ranks.stores(), self.heaps.locate)
        return True

    def reset(self, message: Reset) -> None:
        self._ranks.reset(self._programs[message.index].handle)
        if self._audit:
            self._ranks.stores()  # of the failed launch

    def delay(self, message: Delay) -> None:
        self._ranks.delay(message.segment, message.record, message.layer, message.seconds)

    @property
    def link_bytes(self) -> int:
        return self._ranks.link_bytes(self._rank)

    def intervals(self) -> tuple[Intervals, int]:
        return self._ranks.intervals()

    def close(self) -> None:
        """Abort what runs, release everything."""
        self._ranks.close()
