"""Runs a program with one kernel launch per phase (operation) instead of one for the whole step. The instructions and
their code are the same, but no instruction waits: a kernel starts when the kernel of the previous phase has ended.

This is the baseline that shows how much time the megakernel saves. It also helps to find errors: if results differ from
the megakernel's, the program may lack a wait.
"""

from __future__ import annotations

from typing import Any

from ...program import SEGMENTS, Program
from ...targets.launch import BODY, PROLOGUE
from .driver import Graph, Kernel, Prepared
from .loaded import Grid, Tables


class PhaseGraph:
    """A program's phases on one GPU, as a CUDA graph with a kernel launch per phase. If the heap's buffers move, which
    increases its `generation`, a new graph must be recorded."""

    def __init__(self, program: Program, grid: Grid, kernel: Kernel, generation: int) -> None:
        self.generation = generation
        arrays, plan = {}, []
        for index, name in enumerate(SEGMENTS):
            for number, phase in enumerate(program.phases(index)):
                arrays[f"{name}{number} records"], arrays[f"{name}{number} offsets"] = phase.records, phase.offsets
                plan.append((index, f"{name}{number}"))
        self._tables = Tables(grid.gpu, arrays)
        layers = range(program.dims.model.layers)
        order = [
            (index, layer, name)
            for segment in range(PROLOGUE, len(SEGMENTS))
            for layer in (layers if segment == BODY else (0,))
            for index, name in plan
            if index == segment
        ]
        self._launches = [Prepared(kernel, grid.blocks, self._params(grid, *phase)) for phase in order]
        self._graph: Graph = grid.gpu.record(self._begin)

    def _params(self, grid: Grid, segment: int, layer: int, name: str) -> Any:
        params = type(grid.params).from_buffer_copy(grid.params)
        params.records[segment] = self._tables[f"{name} records"]
        params.offsets[segment] = self._tables[f"{name} offsets"]
        params.synchronise, params.segments = 0, 1 << segment
        params.layer_begin, params.layer_end = layer, layer + 1
        return params

    def _begin(self) -> None:
        for launch in self._launches:
            launch.begin(together=False)

    def launch(self) -> None:
        self._graph.launch()

    def close(self) -> None:
        self._graph.close()
        self._tables.close()
