"""Fourth stage of the verifier: does each access to a buffer come after the accesses that it must follow?

A step means the same as running the program's phases (operations) one after another: the prologue, then the body once
per layer, then the epilogue. So for each region of each rank's copy of a buffer, the following must hold. No phase
writes an element twice. A value that a phase reads was written by the last earlier phase that writes the buffer. A read
comes after that write. A write comes after the previous write and after all reads of the previous value. "After" means
that the later access begins when the earlier access has ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import (
    BUFFERS,
    MAX_PHASES,
    Access,
    Buffer,
    Column,
    Dims,
    Forward,
    Index,
    Kind,
    Space,
    accesses,
    item_columns,
)
from megakernel.program import SEGMENTS, Program
from megakernel.program.part import Use, extent
from megakernel.program.phases import Ints, phases_of
from megakernel.scheduler.verify import native
from megakernel.scheduler.verify.native import Int32s
from megakernel.scheduler.verify.order import Events, Unrolled, row_blocks

_HOST = MAX_PHASES + 1  # number of an imaginary last phase, in which the host reads the outputs of rank 0
_KINDS = {Kind.READ: (native.READ,), Kind.WRITE: (native.WRITE,), Kind.UPDATE: (native.READ, native.WRITE)}
_Where = tuple[Ints | Column | int, ...]  # the rank, event, row, row_end, col and col_end of accesses
_LAYERED = np.array([spec.layered for spec in BUFFERS.values()], dtype=np.uint8)


def _touches(program: Program, events: list[Events], found: list[Use]) -> Iterator[Int32s]:
    """Yield all memory accesses, each to a rectangle of rows and columns of a buffer, as arrays [8, n]: phase, place (a
    copy of the buffer on a rank), kind (read or write), event (execution of an instruction), and the rectangle."""
    by_name = {e.part.name: e for e in events}
    dealt = {a.buffer for use in found for a in use.accesses if a.index is Index.LOGIT_OWNER}
    for use in found:
        segment = by_name[use.part.name]
        for access in use.accesses:
            if access.index is Index.ITEM:
                touched = list(_items(segment, use.dims, access))
            elif access.index is Index.LOGIT_ROW:
                touched = list(_logit_rows(segment, use, access))
            else:
                col, col_end = access.col, access.col_end
                if access.buffer in dealt:
                    # The inputs of a step decide which rows each rank writes, so a proof cannot know them. Instead, it
                    # treats the buffer as if rank r wrote exactly column r of every row.
                    mine = access.index is Index.LOGIT_OWNER
                    col = np.full_like(col, use.dims.split.rank if mine else 0)
                    col_end = np.full_like(col, use.dims.split.rank + 1 if mine else program.ranks)
                box = access.row, access.row_end, col, col_end
                copies = [access.rank] if isinstance(access.rank, np.ndarray) else access.copies(use.dims)
                touched = [(rank, use.rows, *box) for rank in copies]
            for kind, (rank, *where) in itertools.product(_KINDS[access.kind], touched):
                yield _touch(use.phase.number, access.buffer * program.ranks + rank, kind, *where)
    for buffer, rank in _declared(program.forward, program.dims)[1]:
        none, height, width = (np.array([edge]) for edge in (0, *extent(buffer, program.dims)))
        yield _touch(_HOST, buffer * program.ranks + rank, native.HOST, none, none, height, none, width)


def _touch(*rows: Ints | Column | int) -> Int32s:
    return np.array(np.broadcast_arrays(*rows), np.int32)


def _items(events: Events, dims: Dims, access: Access) -> Iterator[_Where]:
    """Yield the accesses of attention: one for each row block and group of KV heads. The attention of such a group
    counts as one event. It also reads K and V of other row blocks, after waiting for the counters of these blocks.
    Those reads need no entries of their own: the other blocks' events read the same K and V after the same counters,
    and nothing overwrites K and V, which every layer has of its own."""
    grid = events.items[dims.split.rank]
    blocks, groups = (a.ravel() for a in np.indices(grid.event.shape))
    row, row_end = dims.block_rows(blocks)
    edges = np.minimum(np.arange(grid.event.shape[1] + 1) * grid.group_heads, dims.split.rank_kv_heads).tolist()
    columns = [item_columns(access.buffer, dims, first, end) for first, end in itertools.pairwise(edges)]
    col, col_end = np.array(columns)[groups].T
    copies = [dims.owner(row)] if access.rank is None else access.copies(dims)
    for rank in copies:
        yield rank, grid.event.ravel(), row, row_end, col, col_end


def _logit_rows(events: Events, use: Use, access: Access) -> Iterator[_Where]:
    """Yield the reads of the rows that get logits. With an indexed wait, an instruction waits for the counter of
    each row block from which the step's inputs select rows. Each row is then read after the counter of its row block.
    Without an indexed wait, all rows are read after the instruction's ordinary waits."""
    d = use.dims
    blocks = row_blocks(d, d.split.rank)
    row, row_end = d.block_rows(blocks)
    box = (row, row_end, np.zeros_like(row), np.full_like(row, access.col_end[0]))
    plain = use.rows
    for reads in (r for r in events.reads if r.rank == d.split.rank and np.isin(r.records, use.rows).any()):
        yield d.split.rank, reads.event, *box
        plain = np.setdiff1d(plain, reads.records)
    for record in plain:
        yield d.split.rank, np.full(len(blocks), record), *box


@lru_cache(maxsize=64)
def _declared(forward: Forward, dims: Dims) -> tuple[NDArray[np.uint8], list[tuple[Buffer, int]]]:
    """Return which buffers each phase (operation) writes on any rank, as an array [phase number, buffer], and a list of
    outputs. The list has a pair (buffer, rank) for each output that is gathered on one rank, where the host reads it
    after a launch."""
    writes = np.zeros((_HOST + 1, len(BUFFERS)), dtype=np.uint8)
    outputs: list[tuple[Buffer, int]] = []
    for phase in forward:
        for access in accesses(phase, {name: np.ones(1, dtype=np.int32) for name in phase.operands}, dims):
            writes[phase.number, access.buffer] |= access.kind is not Kind.READ
            if BUFFERS[access.buffer].space is Space.OUTPUT and access.buffer is not Buffer.LOGITS:
                assert isinstance(access.rank, int)
                outputs.append((access.buffer, access.rank))
    return writes, outputs


def check_data(unrolled: Unrolled, found: list[Use], order: NDArray[np.int32], most: int) -> Iterator[str]:
    """Yield up to `most` violations: elements that a phase writes twice, or that are read without having been written
    by the right phase. If there are none, yield pairs of accesses that are not ordered as they must be."""
    program = unrolled.program
    events = [unrolled.runs[0], unrolled.runs[1], unrolled.runs[-1]]
    writes, _ = _declared(program.forward, program.dims)
    segment = phases_of(program.forward).segment[: _HOST + 1].astype(np.int32)
    segment[_HOST] = SEGMENTS.index("epilogue")
    touches = np.concatenate([*_touches(program, events, found)], axis=1)
    step = native.order_step(program.ranks, segment, writes, _LAYERED, touches)
    nothing = np.zeros(0, dtype=np.int32)
    ends, lasts = (rows.astype(np.int32) for rows in unrolled.ends()) if program.ranks > 1 else (nothing, nothing)
    for violation in native.unordered(unrolled.graph, order, step, ends, lasts, most):
        yield _describe(unrolled, violation)


def _describe(unrolled: Unrolled, v: np.void) -> str:
    ranks = unrolled.program.ranks
    earlier = "nothing" if v["earlier"] < 0 else unrolled.label(int(v["earlier"]))
    later = "the host" if v["later"] < 0 else unrolled.label(int(v["later"]))
    if v["what"] == native.OVERTAKES:
        return f"{later} may end its worker's launch before {earlier}: the next launch could overtake this one"
    buffer = Buffer(v["place"] // ranks).name
    copy = f" of rank {v['place'] % ranks}" if ranks > 1 else ""
    box = f"rows {v['row']}..{v['row_end']}, columns {v['col']}..{v['col_end']}{copy}"
    if v["what"] == native.TWICE:
        return f"{later} and {earlier} both write {buffer} {box}"
    if v["what"] == native.MISSING:
        phase = unrolled.program.forward.by_number.get(int(v["phase"]))
        should = f"no {phase.name}" if phase else "nothing before it"
        return f"{later} reads {buffer} {box}, which {should} wrote; last written by {earlier}"
    if v["what"] == native.NOT_ONWARD:
        return f"{later} reads {buffer} {box}, which only the prologue wrote, and nothing orders it after {earlier}"
    does, did = {0: ("overwrites", "wrote"), 1: ("reads", "wrote"), 2: ("overwrites", "reads")}[int(v["reads"])]
    return f"{later} {does} what {earlier} {did} in {buffer}, {box}, and no counter orders them"
