"""A program on the GPUs: its instructions, its counters, and the arguments of its launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import Buffer, StepTable, record
from ...program import SEGMENTS, Program, Segment
from ...targets import HOPPER
from ...targets.launch import BODY, EPILOGUE, PROLOGUE, STRUCTURES, WARPS
from . import stall
from .driver import Gpu, Kernel, Prepared
from .heap import STATUS_BYTES, Heap
from .limits import phase_refusal
from .maps import map_bits

ALL_SEGMENTS = 1 << PROLOGUE | 1 << BODY | 1 << EPILOGUE
_ALIGNMENT = 256
_ABORT_BYTES = 4

Params = STRUCTURES["Params"]


class Tables:
    """Several arrays in a single allocation on a GPU. Indexing by name returns an array's address."""

    def __init__(self, gpu: Gpu, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._gpu = gpu
        self._offsets: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            self._offsets[name] = end
            end += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._base, self._size = gpu.allocate(end), end
        whole = np.zeros(end, np.uint8)
        for name, array in arrays.items():
            start = self._offsets[name]
            whole[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        gpu.upload(self._base, whole)

    def __getitem__(self, name: str) -> int:
        """Address of an array."""
        return self._base + self._offsets[name]

    def clear(self) -> None:
        """Fill all arrays with zeros."""
        self._gpu.use()
        self._gpu.fill(self._base, 0, self._size)

    def close(self) -> None:
        self._gpu.free(self._base)


class Grid:
    """The part of a program that one GPU runs, for all ranks on it. `params` are its launch arguments."""

    def __init__(self, heap: Heap, program: Program, gpu: Gpu, ranks: range, arrivals: Mapping[str, Any]) -> None:
        self.gpu, self.ranks, self._heap, self._program = gpu, ranks, heap, program
        lists = segments(program)
        ranks_dims = program.dims.ranks
        # The keys of both dictionaries are fields of Params. For a key in `arrays`, the field is a pointer. For a key
        # in `several`, it is an array of pointers.
        arrays: dict[str, NDArray[Any]] = {
            "dims": np.frombuffer(b"".join(bytes(d.native) for d in ranks_dims), np.uint8),
            "phases": np.stack([program.forward.words(d) for d in ranks_dims]),
            **arrivals,
            "buffers": heap.addresses(),
            "layer_stride": heap.strides(),
            "step_words": StepTable(program.dims).words,
            "diagnoses": np.zeros(self.blocks * WARPS, stall.NOTE),
        }
        several: dict[str, list[NDArray[Any]]] = {
            "records": [s.records for s in lists],
            "offsets": [s.offsets.astype(np.int32) for s in lists],
            "totals": [t.astype(np.int32) for t in (program.totals_first, program.totals_middle, program.totals_last)],
        }
        numbered = {f"{name}{i}": array for name, group in several.items() for i, array in enumerate(group)}
        self._tables = Tables(gpu, arrays | numbered)
        mapped, mapped_everywhere = map_bits(program.forward, program.dims)
        self.params: Any = Params(
            mapped=mapped,
            mapped_everywhere=mapped_everywhere,
            first_rank=ranks.start,
            ranks=len(ranks),
            workers=program.workers,
            counters=program.counters,
            queues=program.rank_queues,
            synchronise=1,
            pipelined=1,
            segments=ALL_SEGMENTS,
            layer_begin=0,
            layer_end=program.dims.model.layers,
        )
        for name in arrays:
            setattr(self.params, name, self._tables[name])
        for name, group in several.items():
            getattr(self.params, name)[:] = [self._tables[f"{name}{i}"] for i in range(len(group))]
        self._notes = gpu.pinned(self.blocks * WARPS * stall.NOTE.itemsize)
        self._prepared: dict[int, Prepared] = {}
        self._point()

    @property
    def blocks(self) -> int:
        return len(self.ranks) * self._program.workers

    def _point(self) -> None:
        self.params.abort = self._heap.status[self.ranks.start]
        self.params.maps = self._heap.maps(self.gpu, self._program.forward, self._program.dims)

    def refresh(self) -> None:
        """Update the launch arguments after the heap's buffers have moved to other addresses."""
        self.gpu.use()
        self.gpu.upload(self._tables["buffers"], self._heap.addresses())
        self._point()

    def send(self, words: NDArray[np.uint8]) -> None:
        """Start to copy a step table from pinned memory to the GPU."""
        self.gpu.send(self._tables["step_words"], words)

    def prepared(self, kernel: Kernel) -> Prepared:
        """Return an object that launches the program with this kernel."""
        known = self._prepared.get(id(kernel))
        return known or self._prepared.setdefault(id(kernel), Prepared(kernel, self.blocks, self.params))

    def waits(self) -> list[stall.Wait]:
        """Return what the watchdog has recorded: what each warp waited for when the launch was aborted."""
        self.gpu.peek(self._notes, self._tables["diagnoses"])
        return stall.waits_of(self._program, self._notes.view(stall.NOTE), self.ranks)

    def forget_waits(self) -> None:
        self.gpu.use()
        self.gpu.fill(self._tables["diagnoses"], 0, self._notes.nbytes)

    def close(self) -> None:
        self.gpu.unpin(self._notes)
        self._tables.close()


class Loaded:
    """A program on all GPUs. `launches` is the number of launches since the counters were last reset to zero. `program`
    is kept alive here, because a backend finds this object by the id() of its program."""

    def __init__(self, heap: Heap, program: Program) -> None:
        _check_limits(program)
        HOPPER.check(program)
        self.program = program
        self.launches = 0
        self._synchronises = True
        self._heap = heap
        self._generation = heap.generation
        sizes = {
            "counter_values": (program.dims.model.layers + 1) * program.counters,
            "claims": program.dims.model.layers * program.rank_queues,
        }
        zeros = {name: np.zeros(n, np.int32) for name, n in sizes.items()}
        self._own = [Tables(heap.node.gpu(rank), zeros) for rank in range(program.ranks)]
        pointers = {name: np.array([own[name] for own in self._own], np.uint64) for name in sizes}
        self.grids = [Grid(heap, program, gpu, ranks, pointers) for gpu, ranks in heap.node.grids()]
        first = self.grids[0].gpu
        self._words = first.pinned(StepTable(program.dims).words.nbytes)
        self._answers = self._answer_memory()

    def _answer_memory(self) -> list[NDArray[np.uint8]]:
        """Allocate pinned host memory for each GPU's status, which on the first GPU is followed by outputs."""
        heap, rows = self._heap, self.program.dims.bucket.logit_rows
        end = heap.address(0, Buffer.LOGPROBS_OUT) + rows * np.dtype(np.float32).itemsize
        sizes = [end - heap.status[0]] + [STATUS_BYTES] * (len(self.grids) - 1)
        return [grid.gpu.pinned(size) for grid, size in zip(self.grids, sizes, strict=True)]

    def settle(self) -> None:
        """If the heap's buffers have moved since the last launch, use their new addresses from now on."""
        if self._generation == self._heap.generation:
            return
        for grid, answer in zip(self.grids, self._answers, strict=True):
            grid.refresh()
            grid.gpu.unpin(answer)
        self._answers = self._answer_memory()
        self._generation = self._heap.generation

    def synchronise(self, wanted: bool) -> None:
        """Set whether instructions wait and signal. If this changes, the counters are reset, because launches without
        signals do not count in them."""
        if wanted != self._synchronises:
            self.reset()
            for grid in self.grids:
                grid.params.synchronise = wanted
            self._synchronises = wanted

    def send(self, words: NDArray[np.int32]) -> None:
        """Start to copy a step table to every GPU. The previous launch must have ended."""
        pinned = self._words[: words.nbytes]
        pinned[:] = words.view(np.uint8)
        for grid in self.grids:
            grid.gpu.use()
            grid.send(pinned)

    def fetch(self) -> None:
        """Start to copy a launch's status and outputs to the host. Then `answered` says whether they are there."""
        for grid, answer in zip(self.grids, self._answers, strict=True):
            grid.gpu.use()
            grid.gpu.fetch(answer, self._heap.status[grid.ranks.start])
            grid.gpu.mark()

    def answered(self) -> bool:
        return all(grid.gpu.done() for grid in self.grids)

    def idle(self) -> bool:
        """Whether nothing runs."""
        return all(grid.gpu.idle() for grid in self.grids)

    def outputs(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The tokens and log-probabilities of the last launch, as views of pinned memory: two arrays [logit_rows]."""
        rows, base = self.program.dims.bucket.logit_rows, self._heap.status[0]
        tokens, logprobs = (
            self._answers[0][self._heap.address(0, b) - base :][: 4 * rows]
            for b in (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT)
        )
        return tokens.view(np.int32), logprobs.view(np.float32)

    def failure(self) -> str | None:
        """Return why the last launch failed, or None if it did not fail."""
        if not any(answer[:_ABORT_BYTES].any() for answer in self._answers):
            return None
        return self.waiting() or "no warp says what it waits for"

    def waiting(self) -> str | None:
        """Describe the wait that blocked all others in the last launch, if the watchdog has recorded any wait."""
        waits = [wait for grid in self.grids for wait in grid.waits()]
        table = StepTable(self.program.dims, self._words.view(np.int32))
        return stall.explain(self.program, table, waits) if waits else None

    def reset(self) -> None:
        """Reset counters and other state as before the first launch. No launch may be running."""
        for rank, own in enumerate(self._own):
            own.clear()
            gpu = self._heap.node.gpu(rank)
            gpu.fill(self._heap.address(rank, Buffer.SPLITS), 0, 4 * self.program.dims.bucket.items)
            gpu.fill(self._heap.status[rank], 0, STATUS_BYTES)
        for grid in self.grids:
            grid.forget_waits()
        for grid in self.grids:  # a late zero could erase a signal from another GPU's next launch
            grid.gpu.synchronise()
        self.launches = 0

    def close(self) -> None:
        for grid, answer in zip(self.grids, self._answers, strict=True):
            grid.close()
            grid.gpu.unpin(answer)
        self.grids[0].gpu.unpin(self._words)
        for table in self._own:
            table.close()


def segments(program: Program) -> list[Segment]:
    """Return the program's lists of instructions in the order of the interpreter: prologue, body, epilogue, queues."""
    return [*(getattr(program, name) for name in SEGMENTS), program.queues]


def _check_limits(program: Program) -> None:
    """Raise MegakernelError if an instruction exceeds a GPU's limits."""
    for segment in segments(program):
        numbers = record.phase_number(segment.records)
        for phase in program.forward:
            own = segment.records[numbers == phase.number]
            if len(own) and (why := phase_refusal(phase, own, program.dims)) is not None:
                raise MegakernelError(f"the program cannot be executed: {phase.name} {why}")
