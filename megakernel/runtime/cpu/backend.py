"""The CPU backend with every rank on threads of this process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import Buffer, Dims, Dtype, Forward, StepTable
from ...isa.record import Records
from ...model.checkpoint import Checkpoint
from ...program import Program
from ...trace import Intervals
from ..buffers import write_history
from .base import DEADLOCK_S, Loaded, RanksBackend, RanksLaunch
from .ranks import CpuRanks


@dataclass(frozen=True)
class _Loaded(Loaded):
    handle: int  # in the library


class CpuBackend(RanksBackend):
    """One model's weights and KV pool on this machine's cores.

    `dims` gives the model, ranks, page size and limits. Its numbers of rows are not used, because each program has its
    own. With `null`, everything but the arithmetic is executed (no weights are read, every token is 0). `threads`
    defaults to the usable cores. A launch without progress for `deadlock_s` seconds ends with an error that names a
    blocked instruction.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dims: Dims,
        pages: int,
        *,
        dtype: Dtype,
        threads: int | None = None,
        null: bool = False,
        deadlock_s: float = DEADLOCK_S,
    ) -> None:
        super().__init__(dims, pages, dtype, threads, null)
        self._programs: dict[int, _Loaded] = {}
        self._ranks = CpuRanks(
            checkpoint, dims, pages, range(dims.tp), threads=self.threads, null=null, deadlock_s=deadlock_s
        )

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> NDArray[Any]:
        """A view of a rank's copy of a buffer, in the buffer's declared shape. Packed matrices have
        no view.

        The view may have more rows than a program uses. All ranks share one copy of the output buffers.
        """
        return self._ranks.buffer(buffer, layer, rank)

    @property
    def link_bytes(self) -> NDArray[np.int64]:
        """For each rank, the bytes that it has stored in other ranks' copies of buffers since the backend was made."""
        return np.array([self._ranks.link_bytes(rank) for rank in range(self.dims.tp)], np.int64)

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        for rank in range(self.dims.tp):
            write_history(self.buffer(Buffer.HISTORY, rank=rank), slot, start, tokens)

    def _launch(self, program: Program, table: StepTable, trace: bool) -> RanksLaunch:
        return _Launch(self, program, table, trace)

    def _load(self, program: Program) -> _Loaded:
        """Return the loaded form of a program. The first call for a program checks it, copies it into
        the native library, and enlarges the activation buffers if the program has more rows.
        """
        if (known := self._programs.get(id(program))) is not None:
            return known
        self._ranks.fit(program.dims)
        return self._programs.setdefault(id(program), _Loaded(program, self._ranks.load(program)))

    def _release(self) -> None:
        self._programs.clear()
        self._ranks.close()

    # -- for tests

    def execute(self, instruction: Records, layer: int, table: StepTable, forward: Forward, rank: int = 0) -> None:
        """Run one record's work on a rank's buffers, without waits and signals.

        For attention, this runs all work items that the step table assigns to the record.
        """
        self._ranks.fit(table.dims)
        self._ranks.execute(replace(table.dims, rank=rank), table.words, instruction, layer, forward)

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        self._ranks.delay(segment, record, layer, seconds)


class _Launch(RanksLaunch):
    """A launch in the native library, which runs one launch at a time."""

    loaded: _Loaded | None

    def __init__(self, backend: CpuBackend, program: Program, table: StepTable, trace: bool) -> None:
        super().__init__(backend, program, table, trace)
        self._cpu, self._ranks = backend, backend._ranks

    def _load(self) -> None:
        self.loaded = self._cpu._load(self._program)

    def _go(self) -> None:
        assert self.loaded is not None
        self._ranks.start(self.loaded.handle, self._table.words, self._traced)

    def _finish(self) -> None:
        while not self._ranks.wait():
            pass

    def _stop(self) -> None:
        if self.loaded is None:
            return
        self._ranks.abort()
        with suppress(MegakernelError):  # the error says only that the launch was stopped
            self._finish()
        self._ranks.reset(self.loaded.handle)

    def _results(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        read = self._ranks.buffer
        return read(Buffer.TOKENS_OUT), read(Buffer.LOGPROBS_OUT), read(Buffer.LOGITS)

    def _intervals(self) -> tuple[Intervals, int, float]:
        return *self._ranks.intervals(), 0.0
