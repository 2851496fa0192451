"""A program on the GPUs: its instructions, its counters, and the arguments, inputs and results of its launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import Buffer, Dims, StepTable, record
from ...library import structure
from ...program import Program
from ...targets.hopper import check_pages
from ...targets.launch import BODY, EPILOGUE, PROLOGUE, WARPS
from . import stall
from .driver import Event, Gpu
from .heap import STATUS_BYTES, Heap
from .limits import phase_refusal
from .maps import map_bits

LANES = 2  # launches that may be under way: one runs, and the next is queued behind it
ALL_SEGMENTS = 1 << PROLOGUE | 1 << BODY | 1 << EPILOGUE
_ALIGNMENT, _WORD = 256, 4

Params = structure("cuda/launch.h", "Params")


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
        return self._base + self._offsets[name]

    def clear(self) -> None:
        """Fill all arrays with zeros."""
        self._gpu.use()
        self._gpu.fill(self._base, 0, self._size)

    def close(self) -> None:
        self._gpu.free(self._base)


class Grid:
    """The part of a program that one GPU runs, for all ranks on it. `params` are its launch arguments."""

    def __init__(self, heap: Heap, program: Program, gpu: Gpu, ranks: range, arrivals: Mapping[str, list[int]]) -> None:
        self.gpu, self.ranks, self._heap, self._program = gpu, ranks, heap, program
        ranks_dims = program.dims.ranks
        # The keys of both dictionaries are fields of Params. For a key in `arrays`, the field is a pointer. For a key
        # in `several`, it is an array of pointers.
        arrays: dict[str, NDArray[Any]] = {
            "dims": np.frombuffer(b"".join(bytes(d.native) for d in ranks_dims), np.uint8),
            "phases": np.stack([program.forward.words(d) for d in ranks_dims]),
            "diagnoses": np.zeros(LANES * self.blocks * WARPS, stall.NOTE),
        }
        several = program.native_arrays()
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
        for name, addresses in arrivals.items():
            getattr(self.params, name)[: len(addresses)] = addresses
        for name in arrays:
            setattr(self.params, name, self._tables[name])
        for name, group in several.items():
            getattr(self.params, name)[:] = [self._tables[f"{name}{i}"] for i in range(len(group))]
        self._notes = gpu.pinned(self.blocks * WARPS * stall.NOTE.itemsize)
        self._point()

    @property
    def blocks(self) -> int:
        return len(self.ranks) * self._program.workers

    def _point(self) -> None:
        self.params.abort = self._heap.status[self.ranks.start]
        for name, array in (("buffers", self._heap.addresses()), ("layer_stride", self._heap.strides())):
            getattr(self.params, name)[: array.size] = array.ravel().tolist()
        self.params.maps = self._heap.maps(self.gpu, self._program.forward, self._program.dims)

    def refresh(self) -> None:
        """Update the launch arguments after the heap's buffers have moved to other addresses."""
        self.gpu.use()
        self._point()

    def diagnoses(self, lane: int) -> int:
        """The address where the watchdog records what each warp waits for. Each launch under way has its own lane."""
        return self._tables["diagnoses"] + lane * self._notes.nbytes

    def waits(self, lane: int) -> list[stall.Wait]:
        """Return what each warp waited for when the launch was aborted."""
        self.gpu.peek(self._notes, self.diagnoses(lane))
        return stall.waits_of(self._program, self._notes.view(stall.NOTE), self.ranks)

    def forget_waits(self) -> None:
        self.gpu.use()
        self.gpu.fill(self.diagnoses(0), 0, LANES * self._notes.nbytes)

    def close(self) -> None:
        self.gpu.unpin(self._notes)
        self._tables.close()


class Lane:
    """What one launch needs besides its program: its step table, in pinned memory and on every GPU, and pinned memory
    for its results. Each launch that may be under way has a lane, so that the host can send a step's inputs while the
    step before runs. Only a lane whose launch has ended may be used again."""

    def __init__(self, heap: Heap, number: int) -> None:
        self.number, self._heap, self._gpus = number, heap, heap.node.gpus
        self._sent, self._began, self._ended, self._done = ([Event(gpu) for gpu in self._gpus] for _ in range(4))
        self._sizes = 0, 0  # bytes of a step table, and of the first GPU's results
        self._pinned: list[NDArray[np.uint8]] = []  # a step table, then each GPU's results
        self.tables: list[int] = []  # address of the step table on each GPU

    def fit(self, dims: Dims) -> None:
        """Make room for programs with the sizes `dims`. No launch may be under way."""
        sizes = max(StepTable(dims).words.nbytes, self._sizes[0]), max(self._end(dims), self._sizes[1])
        if sizes == self._sizes:
            return
        self._free()
        self._sizes, first = sizes, self._gpus[0]
        self._pinned = [first.pinned(size) for size in sizes] + [g.pinned(STATUS_BYTES) for g in self._gpus[1:]]
        self.tables = [gpu.allocate(sizes[0]) for gpu in self._gpus]
        for gpu in self._gpus:  # otherwise the zeros could overwrite the table, which another stream copies
            gpu.synchronise()

    def send(self, table: StepTable) -> None:
        """Start to copy a step table to every GPU. The next launch waits for the copy."""
        used = table.used.view(np.uint8)
        pinned = self._pinned[0][: len(used)]
        pinned[:] = used
        for gpu, address, sent, began in zip(self._gpus, self.tables, self._sent, self._began, strict=True):
            gpu.send(address, pinned, sent)
            began.record()

    def _end(self, dims: Dims) -> int:
        """The size in bytes of the results that the host reads from the first GPU: its status, and then outputs."""
        return self._heap.address(0, Buffer.LOGPROBS_OUT) + dims.bucket.logit_rows * _WORD - self._heap.status[0]

    def fetch(self, dims: Dims) -> None:
        """Start to copy the launch's status and outputs to the host. `aborted` then tells whether they have arrived."""
        parts = self._heap.node.grids(), self._pinned[1:], self._ended, self._done
        for (gpu, ranks), pinned, ended, done in zip(*parts, strict=True):
            ended.record()
            gpu.fetch(pinned[: STATUS_BYTES if ranks.start else self._end(dims)], self._heap.status[ranks.start])
            done.record()

    def aborted(self) -> bool | None:
        """Whether a watchdog has aborted the launch on a GPU, for which others may still wait. None: it still runs."""
        done = [done.done() for done in self._done]
        failed = any(ended and pinned[:_WORD].any() for ended, pinned in zip(done, self._pinned[1:], strict=True))
        return failed if failed or all(done) else None

    @property
    def kernel_s(self) -> float:
        """The seconds that the launch, which has ended, took on the slowest GPU."""
        return max(ended.seconds_since(began) for began, ended in zip(self._began, self._ended, strict=True))

    def outputs(self, dims: Dims) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the tokens and log-probabilities of the launch, which has ended: two arrays [logit_rows]."""
        base, size = self._heap.status[0], dims.bucket.logit_rows * _WORD
        starts = [self._heap.address(0, b) - base for b in (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT)]
        tokens, logprobs = (self._pinned[1][start : start + size].copy() for start in starts)
        return tokens.view(np.int32), logprobs.view(np.float32)

    def _free(self) -> None:
        for pinned in self._pinned:
            self._gpus[0].unpin(pinned)
        for gpu, address in zip(self._gpus, self.tables, strict=False):
            gpu.free(address)

    def close(self) -> None:
        self._free()
        for event in (*self._sent, *self._began, *self._ended, *self._done):
            event.close()


class Loaded:
    """A program on all GPUs. `launches` is the number of launches since the counters were last reset to zero. `program`
    is kept alive here, because a backend finds this object by the id() of its program."""

    def __init__(self, heap: Heap, program: Program) -> None:
        _check_limits(program)
        check_pages(program)
        self.program = program
        self.launches = 0
        self._synchronises = True
        self._heap = heap
        self._generation = heap.generation
        zeros = {
            "counter_values": np.zeros(program.total_counters, np.int32),
            "claims": np.zeros(program.dims.model.layers * program.rank_queues, np.int32),
        }
        self._own = [Tables(heap.node.gpu(rank), zeros) for rank in range(program.ranks)]
        pointers = {name: [own[name] for own in self._own] for name in zeros}
        self.grids = [Grid(heap, program, gpu, ranks, pointers) for gpu, ranks in heap.node.grids()]

    @property
    def moved(self) -> bool:
        """Whether the heap's buffers have moved since the last launch. If so, call `refresh` before the next launch."""
        return self._generation != self._heap.generation

    def refresh(self) -> None:
        for grid in self.grids:
            grid.refresh()
        self._generation = self._heap.generation

    def synchronise(self, wanted: bool) -> None:
        """Set whether instructions wait and signal. If this changes, the counters are reset, because launches without
        signals have added nothing to them."""
        if wanted != self._synchronises:
            self.reset()
            for grid in self.grids:
                grid.params.synchronise = wanted
            self._synchronises = wanted

    def idle(self) -> bool:
        """Whether nothing runs on the GPUs."""
        return all(grid.gpu.idle() for grid in self.grids)

    def waiting(self, lane: int, table: StepTable) -> str | None:
        """Describe the wait that blocks all others in a launch, if the watchdog has recorded any wait."""
        waits = [wait for grid in self.grids for wait in grid.waits(lane)]
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
        for grid in self.grids:
            grid.close()
        for table in self._own:
            table.close()


def _check_limits(program: Program) -> None:
    """Raise MegakernelError if a phase of the program's instructions exceeds a GPU's limits."""
    for number in np.unique(record.phase_number(program.every[0])).tolist():
        phase = program.forward.by_number[number]
        if (why := phase_refusal(phase, program.dims)) is not None:
            raise MegakernelError(f"the cuda backend cannot run the program: its phase {phase.name} {why}")
