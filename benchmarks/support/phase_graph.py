"""Runs a program with one kernel launch per phase (operation) instead of one for the whole step. The instructions and
their code are the same, but no instruction waits: a kernel starts when the kernel of the previous phase has ended.

This is the baseline that shows how much time the megakernel saves. It also helps to find errors: if results differ from
the megakernel's, the program may lack a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megakernel.program import SEGMENTS, Program
from megakernel.runtime.cuda.backend import CudaBackend
from megakernel.runtime.cuda.driver import Kernel, check
from megakernel.runtime.cuda.loaded import Grid, Loaded, Tables
from megakernel.targets.launch import BODY, PROLOGUE


@contextmanager
def by_phases(backend: CudaBackend) -> Iterator[None]:
    """Let `backend`, which must have a single GPU, launch a kernel for each phase while the block runs."""
    graphs: dict[tuple[int, ...], PhaseGraph] = {}

    def run(loaded: Loaded, *, traced: bool) -> None:
        [grid] = loaded.grids
        # Buffers move with the generation, and successive launches have different step tables.
        key = id(loaded.program), backend._heap.generation, grid.params.step_words
        if key not in graphs:
            backend._provide(grid.gpu, grid.params, grid.blocks)
            [kernel] = backend._variant(loaded.program.dims, trace=False)
            graphs[key] = PhaseGraph(loaded.program, grid, kernel)
        graphs[key].launch()

    backend.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del backend.run  # type: ignore[method-assign]
        for graph in graphs.values():
            graph.close()


class PhaseGraph:
    """A program's phases on one GPU, as a CUDA graph with a kernel launch per phase."""

    def __init__(self, program: Program, grid: Grid, kernel: Kernel) -> None:
        arrays, plan = {}, []
        for index, name in enumerate(SEGMENTS):
            for number, phase in enumerate(program.phases(index)):
                arrays[f"{name}{number} records"], arrays[f"{name}{number} offsets"] = phase.records, phase.offsets
                plan.append((index, f"{name}{number}"))
        self._gpu, self._tables = grid.gpu, Tables(grid.gpu, arrays)
        layers = range(program.dims.model.layers)
        order = [
            (index, layer, name)
            for segment in range(PROLOGUE, len(SEGMENTS))
            for layer in (layers if segment == BODY else (0,))
            for index, name in plan
            if index == segment
        ]
        d = self._gpu.driver
        mode = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._gpu.use()
        check("recording a graph", d.cuStreamBeginCapture(self._gpu.stream, mode))
        try:
            for phase in order:
                kernel.launch(grid.blocks, self._params(grid, *phase), together=False)
        finally:
            self._source = check("recording a graph", d.cuStreamEndCapture(self._gpu.stream))
        self._handle = check("making a graph", d.cuGraphInstantiate(self._source, 0))

    def _params(self, grid: Grid, segment: int, layer: int, name: str) -> Any:
        params = type(grid.params).from_buffer_copy(grid.params)
        params.records[segment] = self._tables[f"{name} records"]
        params.offsets[segment] = self._tables[f"{name} offsets"]
        params.synchronise, params.segments = 0, 1 << segment
        params.layer_begin, params.layer_end = layer, layer + 1
        return params

    def launch(self) -> None:
        check("launching a graph", self._gpu.driver.cuGraphLaunch(self._handle, self._gpu.stream))

    def close(self) -> None:
        self._gpu.use()
        self._gpu.driver.cuGraphExecDestroy(self._handle)
        self._gpu.driver.cuGraphDestroy(self._source)
        self._tables.close()
