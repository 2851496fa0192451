"""The reference backend, which executes a program exactly as written, with all ranks in one thread.

Its purpose is to find errors in programs. Instructions run in the order of their streams (one stream per worker), and
wait for counters. So if a wait is missing or wrong, results are wrong or the launch deadlocks, as on other backends. To
make such errors visible, activations are NaN at the start of a launch, and workers can take turns in random order.
Every rank has its own copies of all buffers, and no instruction can read another rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...isa import BUFFERS, OPERATIONS, Buffer, Dims, Dtype, Forward, Phase, Space, StepTable, record
from ...isa.context import Context
from ...isa.integers import Codes, codes
from ...model.checkpoint import Checkpoint, array_of
from ...model.families import places
from ...program import Program
from ..backend import Output
from ..buffers import allocate, check_program, check_table, holds_whole, write_history
from .launch import Counters, ReferenceLaunch

_PER_LAUNCH = tuple(b for b, spec in BUFFERS.items() if spec.space in (Space.ACTIVATION, Space.OUTPUT))


class ReferenceBackend:
    """Implements `Backend` in NumPy. With a `seed`, workers take turns in random order; without, in a fixed order.

    `dims` gives the buffers' sizes until a program with other sizes is launched. For each rank, `link_bytes` counts the
    bytes that the rank has stored in other ranks' buffers.
    """

    name = "reference"
    queues = False

    def __init__(self, checkpoint: Checkpoint, dims: Dims, pages: int, *, seed: int | None = None) -> None:
        self.pages = pages
        self.link_bytes = np.zeros(dims.split.tp, np.int64)
        self._order = None if seed is None else np.random.default_rng(seed)
        self._arrays: list[dict[Buffer, Any]] = [{} for _ in range(dims.split.tp)]
        self._codes: dict[tuple[int, Buffer, int], list[tuple[int, Codes]]] = {}  # by rank, buffer, layer
        self.dims, self._ranks = dims, dims.ranks
        self.load_weights(checkpoint, places(checkpoint.config))
        for buffer, spec in BUFFERS.items():
            if spec.space is Space.STATE:
                self._allocate(buffer)
        # Each program's counters, by the program's id(), which stays valid because Counters keeps the program.
        self._counters: dict[int, Counters] = {}
        self._size_for(dims)

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        for (buffer, layer), (dims, arrays) in product(places, zip(self._ranks, self._arrays, strict=True)):
            spec, stored = BUFFERS[buffer], buffer in checkpoint.storage
            if dims.split.rank and holds_whole(buffer, dims):
                arrays[buffer] = self._arrays[0][buffer]
                continue
            # Matrices that are stored in the types of their file become float32.
            kind = Dtype.F32 if stored else spec.resolve_dtype(dims.model)
            array = array_of(checkpoint, buffer, layer, dims.split, kind)
            arrays.setdefault(buffer, {})[layer] = array.reshape(spec.shape(dims, 0))
            if stored and buffer is not Buffer.EMBED and dims.model.q8_activations:
                rows = checkpoint.rows(buffer, layer, dims.split)
                first = np.cumsum([0, *(len(part.data) for part in rows)]).tolist()
                self._codes[dims.split.rank, buffer, layer] = [
                    (at, codes(part.data, part.dtype))
                    for at, part in zip(first, rows, strict=False)
                    if part.dtype.quantised
                ]

    def _allocate(self, buffer: Buffer) -> None:
        for dims, arrays in zip(self._ranks, self._arrays, strict=True):
            arrays[buffer] = allocate(buffer, dims, self.pages)

    def _size_for(self, dims: Dims) -> None:
        self.dims, self._ranks = dims, dims.ranks
        for buffer in _PER_LAUNCH:
            self._allocate(buffer)

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0) -> NDArray[Any]:
        """A view of a rank's copy of a buffer (of one layer, if layered), in the shape and type it is declared with."""
        array, spec = self._arrays[rank][buffer], BUFFERS[buffer]
        whole = array[0] if spec.space is Space.WEIGHT and not spec.layered else array
        view: NDArray[Any] = whole[layer] if spec.layered else whole
        return view

    def execute(
        self, instruction: NDArray[np.int32], layer: int, table: StepTable, forward: Forward, rank: int = 0
    ) -> None:
        """Run the work of one instruction record on a rank's buffers, without its waits and signals. An attention
        instruction runs all of its items."""
        phase = forward.of_record(instruction)
        operands = instruction[record.OPERAND_WORD :][: len(phase.operands)]
        OPERATIONS[phase.operation].execute(self.context(phase, table.rank(rank), layer), *operands.tolist())

    def context(self, phase: Phase, table: StepTable, layer: int) -> Context:
        """Return the data that an instruction of `phase` can access in a layer, on the step table's rank."""
        rank = table.dims.split.rank

        def send(buffer: Buffer, to: int, index: Any, values: NDArray[Any]) -> None:
            target = self.buffer(buffer, layer, to)
            target[index] = values
            self.link_bytes[rank] += target[index].nbytes

        def own(buffer: Buffer, ahead: int = 0) -> NDArray[Any]:
            return self.buffer(buffer, min(layer + ahead, self.dims.model.layers - 1), rank)

        def own_codes(buffer: Buffer, ahead: int = 0) -> list[tuple[int, Codes]]:
            at = min(layer + ahead, self.dims.model.layers - 1) if BUFFERS[buffer].layered else 0
            return self._codes.get((rank, buffer, at), [])

        return Context(phase, self._ranks[rank], table, own, send, own_codes, layer)

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        for rank in range(self.dims.split.tp):
            write_history(self.buffer(Buffer.HISTORY, rank=rank), slot, start, tokens)

    def close(self) -> None:
        self._arrays.clear()
        self._counters.clear()

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> DeferredLaunch:
        return DeferredLaunch(partial(self.launch, program, table, trace=trace))

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        check_program(self.dims, program)
        check_table(program, table, self.pages)
        if program.dims != self.dims:
            self._size_for(program.dims)
        self._poison()
        if id(program) not in self._counters:
            self._counters[id(program)] = Counters(program)
        counters = self._counters[id(program)]
        launch = ReferenceLaunch(program, table, counters, self.context, self.execute)
        begin = time.perf_counter()
        try:
            counters.launch += 1
            launch.run(self._order)
        except BaseException:
            # A failed launch leaves counters incomplete, also those of finished items in SPLITS. Set all to 0.
            counters.reset()
            for rank in range(self.dims.split.tp):
                self.buffer(Buffer.SPLITS, rank=rank).fill(0)
            raise
        return Output(
            tokens=self.buffer(Buffer.TOKENS_OUT),
            logprobs=self.buffer(Buffer.LOGPROBS_OUT),
            logits=self._logits(),
            hidden=self.buffer(Buffer.Y),
            seconds=time.perf_counter() - begin,
            trace=launch.trace() if trace else None,
        )

    def _logits(self) -> NDArray[np.float32]:
        """Return the logits of all rows. Each row is read from the rank that has sampled it."""
        own = self.dims.own_logit_rows
        parts = [self.buffer(Buffer.LOGITS, rank=r)[r * own : (r + 1) * own] for r in range(self.dims.split.tp)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _poison(self) -> None:
        """Fill activations with NaN, so that results show whether a launch reads something that it has not written."""
        for rank in range(self.dims.split.tp):
            for buffer in _PER_LAUNCH:
                dtype = BUFFERS[buffer].resolve_dtype(self.dims.model)
                if dtype is not Dtype.I32:
                    self.buffer(buffer, rank=rank).fill(np.nan if dtype is Dtype.F32 else 0x7FC0)


class DeferredLaunch:
    """A launch that is executed when `wait` is called, because the reference backend has no thread of its own."""

    def __init__(self, run: Callable[[], Output]) -> None:
        self._run = run

    def wait(self) -> Output:
        return self._run()

    def abort(self) -> None:
        pass
