"""What a Hopper GPU requires of a program, such as its tile sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import BUFFERS, Columns, Dims, Loads, Phase, Units, itemsize, traffic
from ..program import SEGMENTS, Program
from ..program.part import Part, each
from ..program.phases import Ints
from . import pages


def violations(parts: Sequence[Part]) -> Iterator[str]:
    """Describe each instruction that a GPU cannot execute, because it needs more shared-memory pages than an SM has, or
    its tile does not fit pages. The program must have passed all other checks. Programs for CPUs have no pages."""
    dims = parts[0].program.dims
    for index, part in enumerate(parts if dims.worker.ring_pages else ()):
        if (needed := pages.kv_pages(dims)) > dims.worker.ring_pages:
            what = f"it holds {needed} pages at once, but the ring has {dims.worker.ring_pages}"
            yield from each(part, part.rows(part.phases.attention), what)
        for phase, d, rows, columns in part.program.by_phase(index):
            if phase.is_matmul:
                yield from _tile_pages(part, phase, rows, columns, d)


def check_pages(program: Program) -> None:
    """Raise MegakernelError with the first of `violations`, if there is one."""
    if (found := next(violations([Part(program, name) for name in SEGMENTS]), None)) is not None:
        raise MegakernelError(f"the program is wrong: {found}: compile it again")


def loads(phase: Phase, columns: Columns, dims: Dims) -> Loads:
    """Return the bytes that instructions with operands `columns` load on rank `dims.rank` (see `isa.traffic`). The
    inputs that a GPU's matmuls load several times are counted each time."""
    found = traffic.loads(phase, columns, dims)
    if not (dims.worker.ring_pages and phase.is_matmul and phase.norm is None) or pages.one_row(dims):
        return found
    return replace(found, read=_through_the_ring(phase, columns, dims))


def _through_the_ring(phase: Phase, columns: Columns, dims: Dims) -> NDArray[np.float64]:
    """Return how many bytes of input rows each matmul instruction loads into shared memory. Inputs are loaded several
    times. Matmuls as dot products load all inputs again each time their weights have filled the ring buffer of
    shared-memory pages. Matmuls on tensor cores load all inputs once for every 256 (CHUNK) output columns."""
    rows, cols = columns["rows"].astype(np.int64), columns["cols"].astype(np.int64)
    if dims.worker.units == Units.DOTS:
        taken = pages.matmul_pages(phase, columns["rows"], columns["cols"], dims)
        laps = taken.inputs // np.maximum(taken.held_inputs, 1)
        return (laps * rows * (phase.inner(dims.split) * itemsize(dims.model))).astype(np.float64)
    weights = phase.inner(dims.split) * phase.matrices(dims.split) * cols * itemsize(dims.model)
    return (pages.tile_work(phase, rows, cols, dims)[1] - weights).astype(np.float64)


def _tile_pages(part: Part, phase: Phase, rows: Ints, c: Columns, d: Dims) -> Iterator[str]:
    """Describe instructions of a matmul phase whose tiles do not fit pages. `rows` has the instructions' indices, and
    `c` their operands."""
    taken = pages.matmul_pages(phase, c["rows"], c["cols"], d)
    for at in np.nonzero(taken.held > d.worker.ring_pages)[0]:
        held = f"it holds {taken.held[at]} pages at once"
        yield f"{part.label(int(rows[at]))}: {held}, but the ring has {d.worker.ring_pages}"
    dots = d.worker.units == Units.DOTS
    most = pages.dot_rows(max(phase.inner(d.split), 1)) if dots else pages.PAGE_ROWS
    yield from each(part, rows[c["rows"] > most], f"its tile has more than {most} rows")
    if phase.norm is not None:
        most = pages.norm_rows(max(phase.inner(d.split), 1), d)
        yield from each(part, rows[c["rows"] > most], "it has more rows than a matmul can normalise")
    per_page = pages.output_columns(phase, d)
    if not per_page or phase.output is None:
        return
    # Outputs are stored in boxes of BOX_ROWS rows and `per_page` columns. A box must not extend into another tile.
    width = BUFFERS[phase.output].shape(d, 0)[1]
    bad = (c["rows"] % pages.BOX_ROWS != 0) & (c["row"] + c["rows"] != d.bucket.tokens)
    bad |= (c["cols"] % per_page != 0) & (c["col"] + c["cols"] != width)
    yield from each(part, rows[bad], f"its tile is not made of boxes of {pages.BOX_ROWS} rows x {per_page} columns")
