"""The CPU backend with a process per rank. This process drives the others and executes rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import MegakernelError
from ....isa import Buffer, Dims, Dtype, StepTable
from ....model.checkpoint import Checkpoint, Rows, cut
from ....program import Program
from ....trace import DTYPE, Intervals
from ...buffers import write_history
from ..base import DEADLOCK_S, Loaded, RanksBackend, RanksLaunch
from . import torchrun
from .board import Board
from .channel import Delay, Ended, Launch, Load, Measure, Message, Open, Place, Reset, Weight, ready
from .peers import Peer, spawn
from .rank_executor import RankExecutor
from .shared_memory import LINE, Mapping, aligned, create

_STOP_S = 5.0  # a rank that has not left an aborted launch after this time is killed
_CLOCK_ROUNDS = 200


class ProcessBackend(RanksBackend):
    """A CpuBackend whose ranks are processes; each gets an equal part of `threads`. See CpuBackend for the arguments.

    With `audit`, the backend checks that ranks touch each other's memory only as their instructions
    declare; this is slow. If a rank dies, the launch raises RankGone, and the next launch restarts
    all ranks with an empty KV cache and history.
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
        audit: bool = False,
    ) -> None:
        super().__init__(dims, pages, dtype, threads, null)
        self._checkpoint = checkpoint
        self._session = Open(
            rank=0,
            model=checkpoint.name,
            config={name: value for name, value in vars(checkpoint.config).items() if name != "rope"},
            storage={b.name: [[list(p) for p in layer] for layer in s.layers] for b, s in checkpoint.storage.items()},
            dims=asdict(dims),
            pages=pages,
            threads=max(self.threads // dims.tp, 1),
            null=null,
            deadlock_s=deadlock_s,
            audit=audit,
        )
        self.link_bytes = np.zeros(dims.tp, np.int64)  # bytes that each rank has stored on others since it was started
        self._ranks: _Ranks | None = _Ranks(checkpoint, self._session)

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        heaps = self._live().local.heaps
        for rank in range(self.dims.tp):
            with heaps.file(Buffer.HISTORY, rank).opened():
                write_history(heaps.array(Buffer.HISTORY, rank), slot, start, tokens)

    def _launch(self, program: Program, table: StepTable, trace: bool) -> RanksLaunch:
        return _Launch(self, program, table, trace)

    def _live(self) -> _Ranks:
        """Return the ranks. If one of them has died, start all ranks again first."""
        self._check_open()
        if self._ranks is None:
            self._ranks = _Ranks(self._checkpoint, self._session)
        return self._ranks

    def _release(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    # -- for tests

    @property
    def processes(self) -> list[int]:
        """The process ids of ranks 1 and up."""
        return [peer.pid for peer in self._live().peers]

    def delay(self, segment: int, record: int, layer: int, seconds: float) -> None:
        ranks = self._live()
        ranks.local.ranks.delay(segment, record, layer, seconds)
        ranks.ask(Delay(segment, record, layer, seconds))


class _Launch(RanksLaunch):
    loaded: _Loaded | None

    def __init__(self, backend: ProcessBackend, program: Program, table: StepTable, trace: bool) -> None:
        super().__init__(backend, program, table, trace)
        self._owner, self._ranks = backend, backend._live()
        self._ended: dict[int, tuple[Ended, list[int]]] = {}

    def _load(self) -> None:
        self.loaded = self._ranks.load(self._program)

    def _go(self) -> None:
        assert self.loaded is not None
        self._ranks.start(self.loaded, self._table, self._traced)

    def _finish(self) -> None:
        ranks = self._ranks
        while not ranks.local.poll():
            self._listen(0.0)
        while any(peer.busy for peer in ranks.peers):
            self._listen(1.0)
        ended = [self._ended[peer.rank][0].link_bytes for peer in ranks.peers]
        self._owner.link_bytes[:] = [ranks.local.link_bytes, *ended]

    def _listen(self, seconds: float) -> None:
        """Receive the messages that arrive within `seconds`. In a message, a rank says that it is done or why it has
        failed.
        """
        for peer in self._ranks.saying(seconds):
            answer, descriptors = peer.answer()
            assert isinstance(answer, Ended)
            self._ended[peer.rank] = answer, descriptors

    def _stop(self) -> None:
        usable = False
        try:
            usable = self._ranks.stop(self.loaded)
        finally:
            if not usable:
                self._ranks.close()
                self._owner._ranks = None

    def _results(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        heaps = self._ranks.local.heaps
        return heaps.array(Buffer.TOKENS_OUT, 0), heaps.array(Buffer.LOGPROBS_OUT, 0), self._logits()

    def _logits(self) -> NDArray[np.float32]:
        """The logits of all rows, each read from the rank that sampled the row."""
        heaps, rows, own = self._ranks.local.heaps, self._program.dims.logit_rows, self._program.dims.own_logit_rows
        logits: NDArray[np.float32] = heaps.array(Buffer.LOGITS, 0)
        for rank in range(1, self._program.ranks):
            part = slice(rank * own, min((rank + 1) * own, rows))
            with heaps.file(Buffer.LOGITS, rank).opened():
                logits[part] = heaps.array(Buffer.LOGITS, rank)[part]
        return logits

    def _intervals(self) -> tuple[Intervals, int, float]:
        intervals, dropped = self._ranks.local.ranks.intervals()
        parts = [intervals]
        for rank in sorted(self._ended):
            ended, descriptors = self._ended[rank]
            parts.append(Mapping(descriptors[0]).array(0, DTYPE, (ended.intervals,)))
            dropped += ended.dropped
        return np.concatenate(parts), dropped, self._ranks.clock_error_s


@dataclass(frozen=True)
class _Loaded(Loaded):
    index: int
    words: NDArray[np.int32]  # the step table that all ranks read


class _Ranks:
    """All ranks of a model: rank 0's executor and the other ranks' processes."""

    def __init__(self, checkpoint: Checkpoint, session: Open) -> None:
        self._programs: dict[int, _Loaded] = {}
        tp = Dims(**session.dims).tp
        board = Board.make(tp)
        self.board = Board(tp, os.dup(board))
        self._own = torchrun.job() is None  # whether this process starts and ends the other ranks
        self.peers = [spawn(rank) for rank in range(1, tp)] if self._own else torchrun.gather()
        try:
            for peer in self.peers:
                peer.last_words = partial(self.board.words, peer.rank)
                peer.send(replace(session, rank=peer.rank), [board])
            self.local = RankExecutor(session, _Broadcast(checkpoint, self.peers), self.board)
            self._collect()
            self._fit(Dims(**session.dims))
            self.clock_error_s = max(self._measure(peer) for peer in self.peers)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(board)

    def ask(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to all other ranks and wait until they have processed it."""
        for peer in self.peers:
            peer.send(message, descriptors)
        self._collect()

    def _collect(self) -> None:
        for peer in self.peers:
            while peer.busy:
                peer.answer()

    def _measure(self, peer: Peer) -> float:
        peer.send(Measure(_CLOCK_ROUNDS))
        error = self.board.measure_clock(_CLOCK_ROUNDS)
        peer.answer()
        return error

    def load(self, program: Program) -> _Loaded:
        """Return the loaded form of a program. The first call for a program sends it to every rank and
        enlarges the heaps so that the program's buffers fit.
        """
        if (known := self._programs.get(id(program))) is not None:
            return known
        self._fit(program.dims)
        data = program.to_bytes()
        words = len(StepTable(program.dims).words)
        counters = aligned(4 * words)
        start = counters + program.ranks * program.total_counters * LINE
        memory = create("a program", start + len(data))
        file = Mapping(os.dup(memory))
        file.array(start, np.uint8, (len(data),))[:] = np.frombuffer(data, np.uint8)
        index = len(self._programs)
        self._share(Load(index, counters, start, len(data)), [memory])
        loaded = _Loaded(program, index, file.array(0, np.int32, (words,)))
        self._programs[id(program)] = loaded
        return loaded

    def _fit(self, dims: Dims) -> None:
        """Make the heaps large enough for programs of `dims`."""
        if (plan := self.local.heaps.plan(dims)) is not None:
            place, size = plan
            self._share(place, [create(f"rank {rank}'s heap", size) for rank in range(dims.tp)])

    def _share(self, message: Place | Load, descriptors: list[int]) -> None:
        """Send `message`, with the descriptors of new shared memory, to all ranks, and close the descriptors here."""
        try:
            self.ask(message, descriptors)
            self.local.take(message, [os.dup(descriptor) for descriptor in descriptors])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def start(self, loaded: _Loaded, table: StepTable, trace: bool) -> None:
        loaded.words[: len(table.used)] = table.used
        self.board.clear()
        for peer in self.peers:
            peer.send(Launch(loaded.index, trace))
        self.local.start(Launch(loaded.index, trace))

    def saying(self, seconds: float) -> list[Peer]:
        """Wait at most `seconds`. Of the ranks that owe an answer, return those that have answered or ended."""
        busy = [peer for peer in self.peers if peer.busy]
        found = ready([peer.fileno() for peer in busy], seconds)
        return [peer for peer in busy if peer.fileno() in found]

    def stop(self, loaded: _Loaded | None) -> bool:
        """Stop a launch on all ranks, some of which may not have started it. Return whether the ranks can run another
        launch.
        """
        self.board.abort()
        deadline = time.monotonic() + _STOP_S
        with suppress(MegakernelError):  # the error only confirms that the launch was stopped
            while not self.local.poll():
                pass
        while any(peer.busy for peer in self.peers):
            if time.monotonic() > deadline:
                return False
            for peer in self.saying(0.1):
                with suppress(MegakernelError):  # the error only says that the rank was stopped or has ended
                    _, descriptors = peer.answer()
                    for descriptor in descriptors:
                        os.close(descriptor)
        if any(peer.gone for peer in self.peers):
            return False
        if loaded is not None:
            self.ask(Reset(loaded.index))
            self.local.reset(Reset(loaded.index))
        return True

    def close(self) -> None:
        """Release the model on all ranks. Processes that were started here end; those of a torchrun job stay alive."""
        if hasattr(self, "local"):
            self.local.ranks.close()
        for peer in self.peers:
            if self._own:
                peer.end()
            else:
                peer.dismiss()


class _Broadcast:
    """A Checkpoint that also sends every loaded tensor to the other ranks."""

    def __init__(self, checkpoint: Checkpoint, peers: list[Peer]) -> None:
        self.name, self.config = checkpoint.name, checkpoint.config
        self.dtype, self.storage = checkpoint.dtype, checkpoint.storage
        self._checkpoint, self._peers = checkpoint, peers
        self._staging: Mapping | None = None
        self._sent = False

    def rows(self, buffer: Buffer, layer: int, split: Dims) -> list[Rows]:
        """Send all rows of a weight to the other ranks, then return this rank's. The other ranks pack their parts
        while this rank packs its own.
        """
        rows = self._checkpoint.rows(buffer, layer, replace(split, tp=1, rank=0))
        self._send(buffer, layer, [part.data for part in rows], [part.dtype for part in rows])
        return cut(rows, buffer, split)

    def _send(self, buffer: Buffer, layer: int, arrays: Sequence[NDArray[np.generic]], kinds: Sequence[Dtype]) -> None:
        for peer in self._peers:
            if self._sent:
                peer.answer()  # wait until the peer has packed the previous tensor
        descriptors = []
        size = sum(array.nbytes for array in arrays)
        if self._staging is None or self._staging.size < size:
            descriptors = [create("weights on their way to the ranks", size)]
            self._staging = Mapping(os.dup(descriptors[0]))
        begin = 0
        for array in arrays:
            self._staging.array(begin, array.dtype, array.shape)[:] = array
            begin += array.nbytes
        dtypes, shapes = [array.dtype.str for array in arrays], [list(array.shape) for array in arrays]
        message = Weight(buffer, layer, dtypes, shapes, list(kinds))
        for peer in self._peers:
            peer.send(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._sent = True
