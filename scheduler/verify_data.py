"""Third stage of the verifier: does each access come after those that it must come after?

What must come first follows from the instruction table alone. Its order (embed, a layer's phases, final_norm ..
sample) times the layers is the sequential meaning of a step; a phase is all instructions of one opcode in one run.
Each phase must write each element of its outputs exactly once. Then, element by element and phase by phase, a read
must come after the last write before it, and a write after that write and after all reads in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, INSTRUCTIONS, Access, Buffer, Dims, Index, Kind
from .verify_form import Ints, extent, home
from .verify_order import Events, Unrolled

Boxes = Ints  # [n, 4]: row, row_end, col, col_end; rank r's copy of a buffer starts at row r * rows


@dataclass(frozen=True)
class Touch:
    """Events of one phase that touch one buffer, with their boxes; `holders` block later writes."""

    phase: int
    buffer: Buffer
    writes: bool
    events: Ints
    boxes: Boxes
    holders: tuple[Ints, Boxes]


@dataclass(frozen=True)
class Phase:
    """One opcode in one segment; `touches` has reads before writes."""

    name: str
    touches: list[Touch]


def phases(events: Events) -> list[Phase]:
    """Phases of a segment in table order."""
    out = []
    for number, instruction in enumerate(INSTRUCTIONS):
        part = events.part
        if home(instruction) != part.name or not instruction.present(part.program.dims):
            continue
        rows = part.rows(instruction)
        accesses = instruction.accesses(instruction.columns(part.records[rows]), part.program.dims)
        touches = [_touch(number, events, rows, a) for a in accesses]
        out.append(Phase(instruction.name, sorted(touches, key=lambda t: t.writes)))
    return out


def _touch(phase: int, events: Events, rows: Ints, access: Access) -> Touch:
    dims, part = events.part.program.dims, events.part
    height = extent(access.buffer, dims)[0]
    shift = part.rank[rows] * height
    boxes = np.stack([access.row + shift, access.row_end + shift, access.col, access.col_end], axis=1).astype(np.int64)
    writes = access.kind is not Kind.READ
    held = readers = (rows, boxes)
    if access.index is Index.ITEM:
        held = readers = _items(events, boxes[:1], height)
    elif access.index is Index.LOGIT_ROW:
        readers = _logit_rows(events, rows, boxes, height)
    used = readers[1][:, 2] < readers[1][:, 3]
    return Touch(phase, access.buffer, writes, readers[0][used], readers[1][used], held)


def _items(events: Events, box: Boxes, height: int) -> tuple[Ints, Boxes]:
    """Boxes of the attention items. An item also reads K and V of other row blocks, which it waits for in the
    same way: their (row block, group) event stands for that read. K and V have a copy per layer, so nothing
    overwrites them and no write has to wait for such a read."""
    dims, grid = events.part.program.dims, events.items
    assert grid is not None
    rank, block, group = (a.ravel() for a in np.indices(grid.event.shape))
    row = block * dims.row_block
    per_head = (box[0, 3] - box[0, 2]) // dims.kv_heads
    head = group * grid.group_heads
    columns = (
        row,
        np.minimum(row + dims.row_block, dims.tokens),
        head,
        np.minimum(head + grid.group_heads, dims.kv_heads),
    )
    boxes = np.stack(columns, axis=1) * [1, 1, per_head, per_head] + (rank * height)[:, None] * [1, 1, 0, 0]
    return grid.event.ravel(), boxes


def _logit_rows(events: Events, rows: Ints, boxes: Boxes, height: int) -> tuple[Ints, Boxes]:
    """A logit row is read after its row block's counter; without an indexed wait, after the instruction's waits."""
    dims = events.part.program.dims
    start = np.arange(dims.row_blocks) * dims.row_block
    end = np.minimum(start + dims.row_block, dims.tokens)
    left, right = np.zeros_like(start), np.full_like(start, dims.hidden)
    all_events, all_boxes, indexed = [], [], []
    for readers, rank, event in events.reads:
        all_events.append(event)
        all_boxes.append(np.stack([start + rank * height, end + rank * height, left, right], axis=1))
        indexed.append(readers)
    plain = ~np.isin(rows, np.concatenate(indexed)) if indexed else np.ones(len(rows), dtype=np.bool_)
    return np.concatenate([*all_events, rows[plain]]), np.concatenate([*all_boxes, boxes[plain]])


class Cuts:
    """A buffer cut at every edge of every box: its cells are touched as a whole or not at all."""

    def __init__(self, buffer: Buffer, dims: Dims, ranks: int, touches: list[Touch]) -> None:
        height, width = extent(buffer, dims)
        every = np.concatenate([t.boxes for t in touches] + [t.holders[1] for t in touches])
        self.rows = np.unique(np.concatenate([every[:, :2].ravel(), np.arange(ranks + 1) * height]))
        self.cols = np.unique(np.concatenate([every[:, 2:].ravel(), [0, width]]))

    def cells(self, boxes: Boxes) -> Boxes:
        return np.concatenate(
            [np.searchsorted(self.rows, boxes[:, :2]), np.searchsorted(self.cols, boxes[:, 2:])], axis=1
        )

    def box(self, row: int, col: int) -> str:
        return f"rows {self.rows[row]}..{self.rows[row + 1]}, columns {self.cols[col]}..{self.cols[col + 1]}"


def _cuts(events: list[Events], parts: list[list[Phase]]) -> dict[Buffer, Cuts]:
    program = events[0].part.program
    by_buffer: dict[Buffer, list[Touch]] = {}
    for phase in (p for part in parts for p in part):
        for touch in phase.touches:
            by_buffer.setdefault(touch.buffer, []).append(touch)
    return {b: Cuts(b, program.dims, program.ranks, touches) for b, touches in by_buffer.items()}


Map = NDArray[np.int64]  # [row cell, column cell]: the event that writes the cell


def coverage(
    events: list[Events],
) -> tuple[list[str], list[list[Phase]], dict[Buffer, Cuts], dict[tuple[int, Buffer], Map]]:
    """Violations of "each phase writes each element of its outputs once", and what `check_data` needs."""
    parts = [phases(e) for e in events]
    cuts = _cuts(events, parts)
    found: list[str] = []
    maps: dict[tuple[int, Buffer], Map] = {}
    for segment, part in zip(events, parts, strict=True):
        for phase in part:
            for touch in phase.touches:
                if touch.writes:
                    maps[touch.phase, touch.buffer] = _paint(segment, phase, touch, cuts[touch.buffer], found)
    return found, parts, cuts, maps


def _paint(segment: Events, phase: Phase, touch: Touch, cut: Cuts, found: list[str]) -> Map:
    name = touch.buffer.name
    out: Map = np.full((len(cut.rows) - 1, len(cut.cols) - 1), -1)
    for event, (r0, r1, c0, c1) in zip(touch.events.tolist(), cut.cells(touch.boxes).tolist(), strict=True):
        cells = out[r0:r1, c0:c1]
        if cells.max(initial=-1) >= 0:
            row, col = np.argwhere(cells >= 0)[0]
            other = segment.label(int(cells[row, col]))
            found.append(f"{segment.label(event)} and {other} both write {name} {cut.box(r0 + row, c0 + col)}")
        cells[:] = event
    if out.min(initial=0) < 0:
        row, col = np.argwhere(out < 0)[0]
        found.append(f"no {phase.name} writes {name} {cut.box(int(row), int(col))}")
    return out


def check_data(
    unrolled: Unrolled,
    clocks: NDArray[np.int32],
    parts: list[list[Phase]],
    cuts: dict[Buffer, Cuts],
    maps: dict[tuple[int, Buffer], Map],
) -> Iterator[str]:
    """Walk the step's sequential meaning, buffer by buffer, and ask the clocks about each neighbouring pair."""
    checker = _Checker(unrolled, clocks, cuts, maps)
    for run in range(len(unrolled.runs)):
        if 0 < run <= unrolled.layers:
            checker.enter_layer()
        part = parts[0 if run == 0 else 1 if run <= unrolled.layers else 2]
        for phase in part:
            for touch in phase.touches:
                yield from checker.touch(run, touch)


class _Checker:
    """Per buffer: the run and touch that wrote last, and the reads since."""

    def __init__(
        self,
        unrolled: Unrolled,
        clocks: NDArray[np.int32],
        cuts: dict[Buffer, Cuts],
        maps: dict[tuple[int, Buffer], Map],
    ) -> None:
        self.unrolled, self.clocks, self.cuts, self.maps = unrolled, clocks, cuts, maps
        self.writer: dict[Buffer, tuple[int, Touch]] = {}
        self.readers: dict[Buffer, list[tuple[int, Touch]]] = {}
        self.pairs: dict[tuple[str, int, int, Buffer], tuple[Ints, Ints]] = {}

    def enter_layer(self) -> None:
        """Layered buffers have a fresh copy in each layer."""
        for buffer in [b for b in self.writer if BUFFERS[b].layered]:
            del self.writer[buffer], self.readers[buffer]

    def touch(self, run: int, touch: Touch) -> Iterator[str]:
        buffer, last = touch.buffer, self.writer.get(touch.buffer)
        if not touch.writes:
            if last is None:
                yield f"{self._label(run, int(touch.events[0]))} reads {buffer.name}, which nothing wrote before it"
                return
            yield from self._require(last[0], run, touch, self._read_pairs(last[1], touch), "reads", "wrote")
            self.readers[buffer].append((run, touch))
            return
        if last is not None:
            yield from self._require(last[0], run, touch, self._write_pairs(last[1], touch), "overwrites", "wrote")
        for reader_run, reader in self.readers.get(buffer, []):
            pairs = self._held_pairs(reader, touch)
            yield from self._require(reader_run, run, touch, pairs, "overwrites", "reads")
        self.writer[buffer], self.readers[buffer] = (run, touch), []

    def _read_pairs(self, writer: Touch, reader: Touch) -> tuple[Ints, Ints]:
        key = ("read", writer.phase, reader.phase, reader.buffer)
        if key not in self.pairs:
            touched, event = self._overlaps(writer, reader.events, reader.boxes)
            self.pairs[key] = touched, event
        return self.pairs[key]

    def _held_pairs(self, reader: Touch, writer: Touch) -> tuple[Ints, Ints]:
        key = ("held", reader.phase, writer.phase, writer.buffer)
        if key not in self.pairs:
            touched, event = self._overlaps(writer, *reader.holders)
            self.pairs[key] = event, touched
        return self.pairs[key]

    def _write_pairs(self, first: Touch, second: Touch) -> tuple[Ints, Ints]:
        key = ("write", first.phase, second.phase, second.buffer)
        if key not in self.pairs:
            a, b = self.maps[first.phase, first.buffer], self.maps[second.phase, second.buffer]
            both = np.unique(np.stack([a.ravel(), b.ravel()]), axis=1)
            self.pairs[key] = both[0], both[1]
        return self.pairs[key]

    def _overlaps(self, writer: Touch, events: Ints, boxes: Boxes) -> tuple[Ints, Ints]:
        """All (event of the writing phase, event) whose boxes overlap."""
        written = self.maps[writer.phase, writer.buffer]
        distinct, which = np.unique(self.cuts[writer.buffer].cells(boxes), axis=0, return_inverse=True)
        first, second = [], []
        for i, (r0, r1, c0, c1) in enumerate(distinct.tolist()):
            writers, here = np.unique(written[r0:r1, c0:c1]), events[which == i]
            first.append(np.tile(writers, len(here)))
            second.append(np.repeat(here, len(writers)))
        return np.concatenate(first), np.concatenate(second)

    def _require(
        self, earlier_run: int, run: int, touch: Touch, pairs: tuple[Ints, Ints], does: str, did: str
    ) -> Iterator[str]:
        earlier, later = pairs
        unrolled = self.unrolled
        component, position = unrolled.runs[earlier_run].clock[earlier], unrolled.position[earlier_run][earlier]
        known = self.clocks[unrolled.first[run] + later, component] >= position
        for i in np.nonzero(~known)[0]:
            a, b = self._label(earlier_run, int(earlier[i])), self._label(run, int(later[i]))
            yield f"{b} {does} what {a} {did} in {touch.buffer.name}, and nothing orders them"

    def _label(self, run: int, event: int) -> str:
        return self.unrolled.label(int(self.unrolled.first[run]) + event)
