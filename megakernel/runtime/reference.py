"""The reference backend: executes a program as it is written.

Streams and counters are honoured for real, so a program whose waits are wrong computes nonsense or deadlocks here
as it would anywhere: activations are NaN at the start of each launch, and the order in which ready workers run can
be shuffled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, BY_OPCODE, Buffer, Dims, Dtype, Space, StepTable, record
from ..model.checkpoint import Checkpoint
from ..program import Program
from .backend import Output
from .buffers import allocate, check_program, check_table, write_history
from .reference_instructions import EXECUTE, Context
from .reference_launch import Counters, Launch

_PER_LAUNCH = tuple(b for b, spec in BUFFERS.items() if spec.space in (Space.ACTIVATION, Space.OUTPUT))


class ReferenceBackend:
    """Implements `Backend` in NumPy. `seed` shuffles the order in which ready workers run; None: in turn.

    `dims` sizes the buffers that `execute` and `buffer` use until a program of another bucket is launched.
    """

    name = "reference"

    def __init__(
        self, checkpoint: Checkpoint, dims: Dims, pages: int, *, dtype: Dtype, seed: int | None = None
    ) -> None:
        if dtype != dims.dtype:
            raise MegakernelError(f"dtype {dtype.name} differs from that of the dims, {Dtype(dims.dtype).name}")
        self.pages = pages
        self._order = None if seed is None else np.random.default_rng(seed)
        self._arrays: dict[Buffer, Any] = {}
        for buffer, spec in BUFFERS.items():
            if spec.space is Space.WEIGHT:
                layers = range(dims.layers if spec.layered else 1)
                loaded = [checkpoint.load(buffer, layer, dtype) for layer in layers]
                self._arrays[buffer] = loaded if spec.layered else loaded[0]
            elif spec.space is Space.STATE:
                self._arrays[buffer] = allocate(buffer, dims, pages)
        self._counters: dict[int, Counters] = {}  # by id of the program, which the value keeps alive
        self._size_for(dims)

    def _size_for(self, dims: Dims) -> None:
        self.dims = dims
        for buffer in _PER_LAUNCH:
            self._arrays[buffer] = allocate(buffer, dims, self.pages)

    def buffer(self, buffer: Buffer, layer: int = 0) -> NDArray[Any]:
        """A view of a buffer (of one layer where layered), shaped and typed as in BUFFERS."""
        array: NDArray[Any] = self._arrays[buffer][layer] if BUFFERS[buffer].layered else self._arrays[buffer]
        return array

    def execute(self, instruction: NDArray[np.int32], layer: int, table: StepTable) -> None:
        """Run one record's work on the buffers, without its waits and signals. A split's items all together."""
        opcode = int(record.opcode(instruction))
        operands = instruction[record.OPERAND_WORD :][: len(BY_OPCODE[opcode].operands)]
        EXECUTE[opcode](self._context(table, layer), *(int(word) for word in operands))

    def _context(self, table: StepTable, layer: int) -> Context:
        return Context(self.dims, table, partial(self.buffer, layer=layer))

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        write_history(self.buffer(Buffer.HISTORY), slot, start, tokens)

    def close(self) -> None:
        self._arrays.clear()
        self._counters.clear()

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> DeferredLaunch:
        return DeferredLaunch(partial(self.launch, program, table, trace=trace))

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        self._check(program, table)
        if program.dims != self.dims:
            self._size_for(program.dims)
        self._poison()
        if id(program) not in self._counters:
            self._counters[id(program)] = Counters(program)
        counters = self._counters[id(program)]
        launch = Launch(
            program,
            table,
            counters,
            execute=lambda words, layer: self.execute(words, layer, table),
            context=partial(self._context, table),
        )
        begin = time.perf_counter()
        try:
            counters.launch += 1
            launch.run(self._order)
        except BaseException:
            # An aborted launch left counters and arrivals half-way; the next one starts afresh.
            counters.reset()
            self.buffer(Buffer.SPLITS).fill(0)
            raise
        return Output(
            tokens=self.buffer(Buffer.TOKENS_OUT),
            logprobs=self.buffer(Buffer.LOGPROBS_OUT),
            logits=self.buffer(Buffer.LOGITS),
            seconds=time.perf_counter() - begin,
            trace=launch.trace() if trace else None,
        )

    def _check(self, program: Program, table: StepTable) -> None:
        if program.ranks != 1:
            raise MegakernelError(f"the reference backend runs one rank, the program has {program.ranks}")
        check_program(self.dims, program)
        check_table(program, table, self.pages)

    def _poison(self) -> None:
        """Make reads of what this launch has not yet written visible."""
        for buffer in _PER_LAUNCH:
            dtype = BUFFERS[buffer].resolve_dtype(self.dims)
            if dtype is not Dtype.I32:
                self.buffer(buffer).fill(np.nan if dtype is Dtype.F32 else 0x7FC0)


class DeferredLaunch:
    """A launch that runs when it is waited for: the reference has no thread of its own."""

    def __init__(self, run: Callable[[], Output]) -> None:
        self._run = run

    def wait(self) -> Output:
        return self._run()

    def abort(self) -> None:
        pass
