"""Converts the times in a traced launch from the clocks of SMs to nanoseconds.

A thread block reads its SM's cycle counter for each interval, because this is cheap and precise. But the counters of
two SMs cannot be compared: they start at different times, and their rate may change between launches. So a block also
reads the GPU's global timer together with the cycle counter, once when the block begins and once when it ends. The two
pairs of values give the conversion from cycles to nanoseconds. The block reads the timer right after it has advanced,
when it is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...isa import StepTable, slot_work
from ...program import Program
from ...targets.launch import CLOCK_STAMPS
from ...trace import DTYPE, Intervals, Trace, TraceHeader
from .heap import Heap
from .loaded import Grid, Loaded

_PER_INSTRUCTION = 32  # room per instruction, which suffices for all warps in most programs
_MOST = 1 << 16  # maximum number of intervals of a thread block, which take 2 MiB
_READ_CYCLES = 8.2  # cycles to read clock64, as measured on an H100 (`timer` in benchmarks/results/gpu-h100.json)


class Tracing:
    """Memory for a launch's intervals on each GPU."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._memory: dict[int, tuple[int, int, int]] = {}  # for each GPU: address, blocks, intervals per block

    def prepare(self, grid: Grid, program: Program) -> None:
        """Give the next launch on a GPU empty memory for its intervals."""
        address, *have = self._memory.get(grid.gpu.ordinal, (0, 0, 0))
        blocks, capacity = max(grid.blocks, have[0]), max(_capacity(program), have[1])
        if [blocks, capacity] != have:
            address = self._heap.keep(grid.gpu, blocks * (capacity * DTYPE.itemsize + 4 + 8 * CLOCK_STAMPS))
            self._memory[grid.gpu.ordinal] = address, blocks, capacity
        p = grid.params
        p.trace, p.trace_capacity = address, capacity
        p.clocks = address + blocks * capacity * DTYPE.itemsize
        p.trace_counts = p.clocks + 8 * CLOCK_STAMPS * blocks
        grid.gpu.fill(p.trace_counts, 0, 4 * blocks)

    def collect(self, loaded: Loaded, table: StepTable) -> Trace:
        """Return the trace of the launch that has just ended. `table` is its step table."""
        parts, dropped, rates, steps = [], 0, [], [1]
        for grid in loaded.grids:
            p, n = grid.params, grid.blocks
            clocks = grid.gpu.download(p.clocks, 8 * CLOCK_STAMPS * n).view(np.uint64).reshape(n, CLOCK_STAMPS)
            counts = grid.gpu.download(p.trace_counts, 4 * n).view(np.int32)
            stored = np.minimum(counts, p.trace_capacity)
            dropped += int((counts - stored).sum())
            for block in range(n):
                address = p.trace + block * p.trace_capacity * DTYPE.itemsize
                raw = grid.gpu.download(address, int(stored[block]) * DTYPE.itemsize).view(DTYPE)
                parts.append(to_nanoseconds(raw, clocks[block]))
            spent = (clocks[:, 2:] - clocks[:, :2]).astype(np.float64)  # [blocks, (cycles, ns)]
            rates.append(float(np.median(spent[:, 0] / np.maximum(spent[:, 1], 1.0))))
            steps.append(int(np.gcd.reduce(clocks[:, 1::2] - clocks[:, 1::2].min(), axis=None)))
        intervals: Intervals = np.concatenate(parts) if parts else np.zeros(0, DTYPE)
        if len(intervals):
            origin = intervals["begin"].min()
            intervals["begin"] -= origin
            intervals["end"] -= origin
        intervals["launch"] = 1
        intervals = intervals[np.lexsort((intervals["begin"], intervals["worker"], intervals["rank"]))]
        header = TraceHeader(
            program=loaded.program.hash,
            source="cuda",
            tick_s=1e-9,
            read_s=_READ_CYCLES / max(rates) * 1e-9,
            clock_error_s=max(steps) * 1e-9,
            dropped=dropped,
        )
        return Trace(header, intervals, slot_work(table)[None])


def to_nanoseconds(intervals: Intervals, stamps: NDArray[np.uint64]) -> Intervals:
    """Convert a block's intervals to ns of the GPU's global timer. `stamps` are (cycles, ns) at its begin and end."""
    out = intervals.copy()
    cycles, ns = float(stamps[2] - stamps[0]), float(stamps[3] - stamps[1])
    for name in ("begin", "end"):
        since = (intervals[name] - stamps[0]).astype(np.int64)
        out[name] = stamps[1] + np.rint(since * (ns / max(cycles, 1.0))).astype(np.int64).astype(np.uint64)
    return out


def _capacity(program: Program) -> int:
    """How many intervals a thread block can store: enough for the longest stream and all queues of a rank."""
    lists, runs = (program.prologue, program.body, program.epilogue), (1, program.dims.model.layers, 1)
    lengths: Any = sum(np.diff(s.offsets) * n for s, n in zip(lists, runs, strict=True))
    claimed = len(program.queues.records) // max(program.ranks, 1) * program.dims.model.layers
    return min(_MOST, max(1, _PER_INSTRUCTION * (int(lengths.max()) + claimed)))
