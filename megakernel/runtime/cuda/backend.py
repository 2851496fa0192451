"""The CUDA backend: all ranks on Hopper GPUs. A step is one cooperative launch with one thread block per SM."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MegakernelError
from ...isa import BUFFERS, Buffer, Dims, Forward, StepTable, record
from ...model.checkpoint import Checkpoint
from ...program import SEGMENTS, Program, Segment
from ...targets.launch import BODY, Ablation
from ..backend import Backend, Output
from ..buffers import check_history, check_program, check_table
from . import compile
from .driver import Gpu, Kernel
from .heap import Heap
from .limits import refusal
from .loaded import LANES, Lane, Loaded
from .node import GpuNode
from .tracing import Tracing
from .weights import load_weights

_TIMEOUT_S = 10.0
_SPIN_S = 2e-3  # the host polls without pauses for this time, which covers a decode step
_NAP_S = 50e-6
_STOP_S = 5.0
# The host gives up after this multiple of the time limit of the watchdog on the GPU. The watchdog notices only waits,
# not a hardware operation that never completes.
_PATIENCE = 4


def _nothing(streams: int) -> Segment:
    return Segment(np.zeros((0, record.WORDS), np.int32), np.zeros(streams + 1, np.int32))


class DeviceRows:
    """The logits, or the hidden states (Y), of the last launch. A row is copied to the host only when it is read,
    because most steps need none."""

    def __init__(self, heap: Heap, dims: Dims, buffer: Buffer) -> None:
        self._heap, self._dims, self._buffer = heap, dims, buffer

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        """Return rows, like indexing an array [rows, columns]: `rows` is a number, a slice, or a list of numbers."""
        count, columns = BUFFERS[self._buffer].shape(self._dims, 0)
        # Only the rank that sampled a row has its logits, but every rank has all rows of the hidden states (Y).
        rank_rows = self._dims.own_logit_rows if self._buffer is Buffer.LOGITS else count
        kind, wanted = BUFFERS[self._buffer].resolve_dtype(self._dims.model).numpy, np.arange(count)[rows]
        size = columns * kind.itemsize
        got = [self._heap.read_row(r // rank_rows, self._buffer, r, size) for r in wanted.ravel().tolist()]
        return np.array(got, np.uint8).view(kind).reshape(*wanted.shape, columns)


class CudaBackend(Backend):
    """Executes programs on this machine's GPUs, with one model's weights and one KV cache.

    `dims` gives the model, ranks, page size and limits. Its row limits are ignored: each program has its own.

    If a wait takes more than `timeout_s` seconds, the launch ends with an error that names the wait. If a launch takes
    several times as long and cannot be stopped, its GPUs are lost: every later call raises an error.

    Four attributes are for tests and benchmarks. Without `pipelined`, a thread block fetches an instruction only when
    the previous one has ended. `order` is called with the numbers of the GPUs, and returns them in the order in which
    they begin a launch. The other two make results meaningless. Without `synchronised`, no instruction waits for
    another. `ablation` selects a kernel without copies or without arithmetic; its instructions do not wait either.
    """

    name = "cuda"
    queues = True

    def __init__(self, checkpoint: Checkpoint, dims: Dims, pages: int, *, timeout_s: float = _TIMEOUT_S) -> None:
        why = refusal(dims)
        if why is not None:
            raise MegakernelError(f"the cuda backend cannot run {checkpoint.name}: {why}")
        self.dims, self.pages = dims, pages
        self.pipelined, self.synchronised, self.ablation = True, True, Ablation.NONE
        self.order: Callable[[range], Iterable[int]] = iter
        self.kernel_s = 0.0  # seconds that the GPU took for the last launch, without the copies to and from the host
        self.timeout_s = timeout_s
        self._programs: dict[int, Loaded] = {}
        self.running: deque[CudaLaunch] = deque()  # oldest first
        self._node = GpuNode(dims.split.tp)
        self._kernels: dict[compile.Build, list[Kernel]] = {}  # one for each GPU
        self._scratch: dict[int, tuple[int, int]] = {}  # for each GPU, the address and the size of its scratch memory
        self._closed = False
        self._variant(dims)
        self._heap = Heap(self._node, dims, pages)
        self._lanes = deque(Lane(self._heap, number) for number in range(LANES))  # the next launch's lane first
        load_weights(self._heap, checkpoint, dims)
        self._tracing = Tracing(self._heap)

    # -- methods for tests and checks only

    def buffer(self, buffer: Buffer, layer: int = 0, rank: int = 0, dims: Dims | None = None) -> NDArray[Any]:
        """Copy a rank's buffer to the host, in its shape for the sizes `dims` (by default the backend's)."""
        return self._heap.read(rank, buffer, layer, dims or self.dims)

    def set_buffer(self, buffer: Buffer, array: NDArray[Any], layer: int = 0, rank: int = 0) -> None:
        """Write `array` to the beginning of a rank's copy of a buffer."""
        self._heap.write(rank, buffer, layer, array)

    def execute(self, program: Program, index: int, work: Segment, layer: int, table: StepTable) -> None:
        """Run `work`, instructions of one phase in segment number `index`, without their waits and signals.
        `layer` is used only if the segment is the body."""
        parts: dict[str, Any] = dict.fromkeys(SEGMENTS, _nothing(program.ranks * program.workers))
        parts |= {SEGMENTS[index]: work, "queues": _nothing(program.ranks * program.rank_queues)}
        self._fit(program.dims)
        loaded = Loaded(self._heap, replace(program, **parts))
        try:
            loaded.synchronise(False)
            for grid in loaded.grids:
                grid.params.segments = 1 << index
                if index == BODY:
                    grid.params.layer_begin, grid.params.layer_end = layer, layer + 1
            CudaLaunch(self, loaded, table, trace=False).wait()
        finally:
            if not self._closed:  # a closed backend's GPU may have stopped answering, and a call to it would hang
                loaded.close()

    # -- launches

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> CudaLaunch:
        if len(self.running) == LANES:
            raise MegakernelError(f"{LANES} launches are under way, the most allowed: wait for the first or abort it")
        if trace:  # there is memory for one trace
            self._finish_running()
        loaded = self._loaded(program)
        check_table(program, table, self.pages)
        loaded.synchronise(self.synchronised and self.ablation is Ablation.NONE)
        return CudaLaunch(self, loaded, table, trace=trace)

    def load_weights(self, checkpoint: Checkpoint, places: Collection[tuple[Buffer, int]]) -> None:
        load_weights(self._heap, checkpoint, self.dims, places)

    def _loaded(self, program: Program) -> Loaded:
        """Return a program's copy on the GPUs. The first call for a program checks it, copies it, and enlarges
        activation buffers if necessary."""
        if self._closed:
            self._node.gpus[0].check()
            raise MegakernelError("the backend is closed: make another one")
        loaded = self._programs.get(id(program))
        if loaded is None:
            check_program(self.dims, program)
            if (why := refusal(program.dims)) is not None:
                raise MegakernelError(f"the cuda backend cannot run the program: {why}")
            self._check_resident(program)
            self._fit(program.dims)
            loaded = self._programs.setdefault(id(program), Loaded(self._heap, program))
        if loaded.moved:
            self._finish_running()
            loaded.refresh()
        return loaded

    def _fit(self, dims: Dims) -> None:
        """Make room for programs with the sizes `dims`. Running launches end first, because their results may move."""
        self._finish_running()
        self._heap.fit(dims)
        for lane in self._lanes:
            lane.fit(dims)

    def _finish_running(self) -> None:
        for launch in [*self.running]:
            launch.finish()

    def _check_resident(self, program: Program) -> None:
        kernels = self._variant(program.dims, program.forward)
        for kernel, (gpu, ranks) in zip(kernels, self._node.grids(), strict=True):
            room, need = kernel.blocks, len(ranks) * program.workers
            if need > room:
                raise MegakernelError(
                    f"the program needs {program.workers} SMs for each of {len(ranks)} ranks, but GPU {gpu.ordinal} "
                    f"can run it on only {room} at once: compile it with --workers {room // len(ranks)}"
                )

    def _variant(self, dims: Dims, forward: Forward | None = None, *, trace: bool = False) -> list[Kernel]:
        """Return the variant of the kernel that runs programs of these sizes and phases, for each GPU."""
        build = compile.Build.of(dims, forward, trace=trace, ablation=self.ablation)
        if build not in self._kernels:
            code = compile.cubin(build)
            self._kernels[build] = [Kernel(gpu, code) for gpu in self._node.gpus]
        return self._kernels[build]

    def begin(self, loaded: Loaded, table: StepTable, launch: CudaLaunch) -> None:
        """Start `launch` on the GPUs. If another launch is running, the new one begins on each GPU when the other ends
        there. The verifier proves that by then all instructions of the other have ended, on every GPU."""
        launch.lane = lane = self._lanes[0]
        self._lanes.rotate()
        self.running.append(launch)
        lane.send(table)
        for grid, step_words in zip(loaded.grids, lane.tables, strict=True):
            grid.params.step_words, grid.params.diagnoses = step_words, grid.diagnoses(lane.number)
        self.run(loaded, traced=launch.traced)
        lane.fetch(table.dims)

    def run(self, loaded: Loaded, *, traced: bool) -> None:
        """Launch the kernel on the GPUs."""
        loaded.launches += 1
        # Prepare all GPUs' launches before the first starts. Preparing may allocate memory or load code, which may
        # wait until a running kernel ends. If that kernel waits for a GPU not yet started, both hang.
        for grid in loaded.grids:
            grid.gpu.use()
            grid.params.launch = loaded.launches % 2**32
            grid.params.pipelined = self.pipelined
            self._provide(grid.gpu, grid.params, grid.blocks)
            if traced:
                self._tracing.prepare(grid, loaded.program)
        kernels = self._variant(loaded.program.dims, loaded.program.forward, trace=traced)
        for number in self.order(range(len(kernels))):
            kernels[number].launch(loaded.grids[number].blocks, loaded.grids[number].params)

    def stopped(self) -> None:
        """Record that all launches have been stopped, and reset the counters of their programs."""
        for launch in self.running:
            launch.loaded.reset()
        self.running.clear()

    def lose(self) -> None:
        """Record that the GPUs do not answer. They and their memory cannot be used until the process ends."""
        self.running.clear()
        self._closed = True
        for gpu in self._node.gpus:
            gpu.lose()

    def outcome(self, launch: CudaLaunch, table: StepTable, seconds: float) -> Output:
        """Return the output of the oldest launch, which has just ended."""
        self.running.popleft()
        self.kernel_s = launch.lane.kernel_s
        tokens, logprobs = launch.lane.outputs(table.dims)
        trace = self._tracing.collect(launch.loaded, table) if launch.traced else None
        logits, hidden = (DeviceRows(self._heap, table.dims, b) for b in (Buffer.LOGITS, Buffer.Y))
        return Output(tokens, logprobs, logits, hidden, seconds, trace)

    def _provide(self, gpu: Gpu, params: Any, blocks: int) -> None:
        """Set the launch arguments for the watchdog's time limit, and for scratch memory of sampling."""
        params.timeout_ns = round(self.timeout_s * 1e9)
        need = blocks * 2 * self.dims.model.vocab * ctypes.sizeof(ctypes.c_float)
        address, have = self._scratch.get(gpu.ordinal, (0, 0))
        if have < need:
            address = self._heap.keep(gpu, need)
            self._scratch[gpu.ordinal] = address, need
        params.sample_scratch = address

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        slots, length = BUFFERS[Buffer.HISTORY].shape(self.dims, self.pages)
        check_history((slots, length), slot, start, len(tokens))
        for rank in range(self.dims.split.tp):
            self._heap.write(rank, Buffer.HISTORY, 0, np.asarray(tokens, np.int32), at=slot * length + start)

    def close(self) -> None:
        """Abort a running launch, and release the GPUs' memory. Further launches are errors."""
        if self._closed:
            return
        if self.running:
            self.running[0].abort()
        self._closed = True
        for lane in self._lanes:
            lane.close()
        for loaded in self._programs.values():
            loaded.close()
        self._programs.clear()
        self._heap.close()
        for kernel in chain(*self._kernels.values()):
            kernel.close()
        self._node.close()


class CudaLaunch:
    """A launch, which the constructor starts. Launches run one after another, and must be awaited in this order."""

    lane: Lane

    def __init__(self, backend: CudaBackend, loaded: Loaded, table: StepTable, *, trace: bool) -> None:
        self.traced, self.loaded = trace, loaded
        self._backend, self._table = backend, table
        self._output: Output | None = None
        self._begin = time.perf_counter()
        try:
            backend.begin(loaded, table, self)
        except BaseException:
            self.abort()
            raise

    def wait(self) -> Output:
        """Wait for the launch's end. Return its output, with the seconds until the end was noticed. Call it once."""
        return self._output or self.finish()

    def finish(self) -> Output:
        """Wait until the launch ends, and keep its output for `wait`."""
        backend = self._backend
        try:
            ended = self._answered(_PATIENCE * backend.timeout_s)
        except MegakernelError:
            backend.lose()  # the driver itself has failed, and will not answer any more
            raise
        except BaseException:
            self.abort()
            raise
        if not ended or self.lane.aborted():
            self._stop()
            why = self.loaded.waiting(self.lane.number, self._table) or "no warp has recorded a wait"
            backend.stopped()
            raise MegakernelError(f"the launch made no progress and was stopped: {why}")
        now = time.perf_counter()
        self._output = backend.outcome(self, self._table, now - self._begin)
        for next_launch in backend.running:  # it begins now
            next_launch._begin = now
        return self._output

    def abort(self) -> None:
        """Stop all running launches, and return when they have stopped. Their output is lost. Does nothing if this
        launch has ended.

        Raises MegakernelError if a launch does not stop. After that, its GPUs can neither be used nor released.
        """
        if self in self._backend.running:
            self._stop()
            self._backend.stopped()

    def _answered(self, limit_s: float) -> bool:
        """Wait for the launch's end. Return whether it came within `limit_s` seconds after the start."""
        while self.lane.aborted() is None:
            seconds = time.perf_counter() - self._begin
            if seconds > limit_s:
                return False
            if seconds > _SPIN_S:
                time.sleep(_NAP_S)
        return True

    def _stop(self) -> None:
        for grid in self.loaded.grids:
            grid.gpu.interrupt(grid.params.abort)
        limit = time.perf_counter() + _STOP_S
        while not self.loaded.idle():
            if time.perf_counter() > limit:
                raise self._lost()
            time.sleep(_NAP_S)

    def _lost(self) -> MegakernelError:
        """Give up the GPUs, and return an error. The launch may still access all of its memory, so nothing is freed."""
        seconds, loaded = time.perf_counter() - self._begin, self.loaded
        try:
            waiting = loaded.waiting(self.lane.number, self._table)
        except MegakernelError:
            waiting = None  # the watchdog's report could not be read
        self._backend.lose()
        return MegakernelError(
            f"the GPU does not answer: launch {loaded.launches} of program {loaded.program.hash} has not ended after "
            f"{seconds:.0f} s and does not stop{f' ({waiting})' if waiting else ''}: end the process, "
            "nothing else frees the GPU's memory"
        )
