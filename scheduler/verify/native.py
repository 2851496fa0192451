"""Python declarations (ctypes) of the native verifier in csrc/verify."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.library import load, structure

Int32s = NDArray[np.int32]

READ, WRITE, HOST = range(3)  # mk::verify::Kind
TWICE, MISSING, UNORDERED, NOT_ONWARD, OVERTAKES = range(5)  # mk::verify::What
_GRAPH, _STEP, _FOUND = (structure("verify/verify.h", name) for name in ("Graph", "Step", "Found"))
FOUND = np.dtype(_FOUND)
_COLUMNS = ("phase", "place", "kind", "event", "row", "row_end", "col", "col_end")  # of touches


@dataclass(frozen=True)
class EventGraph:
    """The graph of a program whose layers are unrolled. It has `rows` nodes, called rows, and edges from `source` to
    `target`. Executions of instructions come first, sorted by run: the prologue, the body once per layer, the epilogue.
    The other rows are counters. `first` has the first row of each run and, as its last element, the first counter."""

    rows: int
    first: Int32s
    source: Int32s
    target: Int32s

    def native(self) -> Any:
        arrays = {name: getattr(self, name).ctypes.data for name in ("first", "source", "target")}
        return _GRAPH(rows=self.rows, runs=len(self.first) - 1, edges=len(self.source), **arrays)


def order_step(
    ranks: int, segment: Int32s, declares: NDArray[np.uint8], layered: NDArray[np.uint8], touches: Int32s
) -> Any:
    """Return the struct mk::verify::Step, which has the addresses of these arrays. `declares` [phases, buffers] says
    which phase (operation) writes which buffer. `touches` [8, n] describes n accesses: phase, place (a buffer on a
    rank), kind, event (execution of an instruction), and four bounds of rows and columns."""
    arrays: dict[str, NDArray[Any]] = {"segment": segment, "declares": declares, "layered": layered}
    arrays |= dict(zip(_COLUMNS, touches, strict=True))
    sizes = {"phases": len(declares), "buffers": len(layered), "ranks": ranks, "touches": touches.shape[1]}
    return _STEP(**sizes, **{name: array.ctypes.data for name, array in arrays.items()})


def _checked(count: int) -> int:
    if count < 0:
        raise MegakernelError("out of memory while verifying a program: verify it on a machine with more memory")
    return count


def topological_order(graph: EventGraph, missing: Int32s) -> tuple[Int32s, Int32s]:
    """Return a topological order of the graph's rows (nodes), without rows that are on a cycle or behind one. `missing`
    has the number of incoming edges of each row. The second result has, for each row, how many of these edges come from
    rows that the order leaves out."""
    order, left = np.empty(graph.rows, dtype=np.int32), missing.copy()
    count = load().mk_verify_order(ctypes.byref(graph.native()), left.ctypes.data, order.ctypes.data)
    return order[: _checked(count)], left


def unordered(graph: EventGraph, order: Int32s, step: Any, ends: Int32s, lasts: Int32s, most: int) -> NDArray[np.void]:
    """Return up to `most` pairs of accesses whose order is wrong or not ensured, as records of FOUND. `order` is a
    topological order of the graph. Also checks that every stream ends (`lasts`) after all streams' work (`ends`)."""
    found = np.zeros(most, dtype=FOUND)
    what = ctypes.byref(graph.native()), order.ctypes.data, ctypes.byref(step)
    streams = len(ends), ends.ctypes.data, len(lasts), lasts.ctypes.data
    count = load().mk_verify_data(*what, *streams, most, found.ctypes.data)
    return found[: _checked(count)]
