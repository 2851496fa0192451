"""Divides a step's attention (rows x KV heads x KV tokens) into equal shares of work, one for each attention slot.

An attention slot is the list of work items of one attention instruction. Each rank has its own items,
for the KV heads that its query heads use.

Rows are first grouped into query tiles, and the KV heads of a tile into parts. All work is then laid out on one line:
tile after tile, and within a tile part after part. The line is divided into equal lengths, one per slot. If a slot's
share ends inside a tile, the tile is cut there, either between two parts or inside a part. A cut inside a part lies
between two rows or between two KV blocks. A part that is cut between KV blocks is called a split. So there are at most
as many items as tiles, plus three per slot.

A CPU core processes one KV head after another, so a part is one head. An SM computes `pages.UNITS` units side by side.
A unit has `pages.QUERY_TILE` (query row, query head) pairs. In a full tile for an SM, one KV head has enough pairs to
fill all units. In a tile with fewer rows, a part has several KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims, StepTable
from .cuda import pages
from .targets import target_of

Ints = NDArray[np.signedinteger]
# The items of all ranks. Ranks with the same number of KV heads have the same items, so this number
# is the key. The value is the pair (items by step-table field, slot_items).
Dealt = dict[int, tuple[dict[str, Ints], Ints]]

# Rows of a query tile on a CPU, which share each read of K and V. With 32 rows, each loaded element
# is used in enough multiply-adds to hide its load, and the scores (rows x query heads of the group
# x one KV block) still fit a core's L1 cache.
QUERY_TILE = 32
# The number of KV blocks in the smallest item of a split on a CPU. For a smaller item, the hand-off
# and the merge of partial results cost more than the split saves. On a GPU, this number is 1: a
# block takes longer than the hand-off, and with few rows most SMs would otherwise be idle.
SPLIT_GRAIN = 2
# While an SM computes one pass over a KV block, it can load K and V of about this many KV heads from
# HBM. On an H200, the 8 units of a pass (8 x 16 x 128 x 128 x 4 FLOP at 60 % of an SM's 7.5
# TFLOP/s) and their softmax take 3 us. K and V of a head (64 KiB at an SM's 36 GB/s) take 1.8 us.
PASS_HEADS = 2
# If a cut is closer to a part's border than this fraction of a slot's share, it moves to the
# border. The shares become less equal, but this avoids a split and makes fewer items.
SLACK = 1 / 8


class _Cut(Enum):
    """The places at which a step's attention work may be cut into items, from fine to coarse."""

    INSIDE_PARTS = 0
    BETWEEN_PARTS = 1
    BETWEEN_TILES = 2


@dataclass(frozen=True)
class _Tiles:
    """The query tiles, as arrays: consecutive rows of one chunk, or padding (`seq` is -1), in one row block."""

    row: Ints
    rows: Ints
    seq: Ints
    position: Ints  # position of the first row in its sequence; 0 for padding
    chunk_row: Ints  # first row of the chunk to which the tile belongs
    first: Ints  # first KV block that a row sees in any layer: 0 unless all layers have sliding windows
    blocks: Ints  # KV blocks from there up to the last row's position; 0 for padding


def moves(dims: Dims, position: Ints) -> bool:
    """Whether a row at one of these positions sees other KV blocks than the row before it."""
    here, before = (_seen(dims, at, at) for at in (position, position - 1))
    return bool((here[0] != before[0]).any() or (here[1] != before[1]).any())


def _seen(dims: Dims, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The KV blocks [begin, end) that the rows at positions `first` to `last` see, in the layers that see most."""
    begin = np.maximum(first + 1 - max(dims.model.spans), 0) // dims.bucket.kv_block
    return begin, last // dims.bucket.kv_block + 1


def deal_items(dims: Dims, seq: Ints, start: Ints, count: Ints) -> Dealt:
    """Compute every rank's items. Chunk i has `count[i]` rows of sequence `seq[i]`, which begin at position `start[i]`.

    Chunks are in row order. If `dims.items` is too small, tiles are cut more coarsely; if `dims.partials` is too small,
    fewer parts are split. Raises MegakernelError if not even one item per chunk and row block fits.
    """
    by_heads = {rank.split.rank_kv_heads: rank for rank in dims.ranks if rank.split.rank_kv_heads}
    return {heads: _deal(rank, seq, start, count) for heads, rank in by_heads.items()}


def write_items(table: StepTable, dealt: Dealt) -> None:
    """Write the result of `deal_items` into every rank's slot_items and item_* fields."""
    for rank in range(table.dims.split.tp):
        view = table.rank(rank)
        view.item_split[:] = -1
        if heads := view.dims.split.rank_kv_heads:
            items, view.slot_items[:] = dealt[heads]
            for name, column in items.items():
                getattr(view, name)[: len(column)] = column


def _deal(dims: Dims, seq: Ints, start: Ints, count: Ints) -> tuple[dict[str, Ints], Ints]:
    """Return the items of one rank as a dict with a column for each step-table field, and the rank's slot_items."""
    gpu_rows = max(1, pages.UNITS * pages.QUERY_TILE // dims.model.group_size)
    query_rows = gpu_rows if target_of(dims).pages else QUERY_TILE
    for tile_rows in (query_rows, dims.bucket.row_block):
        tiles = _tile(dims, seq, start, count, tile_rows)
        for cut in _Cut:
            pieces = _pieces(dims, tiles, cut)
            if len(pieces.slot) <= dims.bucket.items:
                slots = np.arange(dims.bucket.attention_slots + 1)
                return _items(dims, tiles, pieces), np.searchsorted(pieces.slot, slots)
    raise MegakernelError(
        f"the step needs {len(tiles.row)} attention items, but the program was compiled for at most {dims.bucket.items}"
    )


def _tile(dims: Dims, seq: Ints, start: Ints, count: Ints, tile_rows: int) -> _Tiles:
    live = int(count.sum())
    # Padding is treated as one more chunk at the end.
    chunk_row = np.append(np.cumsum(count) - count, live)
    seq, start = np.append(seq, -1), np.append(start, 0)
    run = np.union1d(chunk_row, np.arange(0, dims.bucket.tokens, dims.bucket.row_block))
    run = run[run < dims.bucket.tokens]
    run_end = np.append(run[1:], dims.bucket.tokens)
    pieces = np.where(run < live, -(-(run_end - run) // tile_rows), 1)
    of = np.repeat(np.arange(len(run)), pieces)
    row = run[of] + tile_rows * (np.arange(len(of)) - (np.cumsum(pieces) - pieces)[of])
    rows = np.where(run < live, tile_rows, dims.bucket.row_block)[of]
    rows = np.minimum(rows, run_end[of] - row)
    chunk = np.searchsorted(chunk_row, row, side="right") - 1
    position = np.where(row < live, start[chunk] + row - chunk_row[chunk], 0)
    first, end = _seen(dims, position, position + rows - 1)
    blocks = np.where(row < live, end - first, 0)
    return _Tiles(row, rows, seq[chunk], position, chunk_row[chunk], first, blocks)


@dataclass(frozen=True)
class _Parts:
    """The division of tiles into parts. Each array has one element per tile."""

    wide: Ints  # number of KV heads in a part; a divisor of the rank's KV heads
    cost: Ints  # cost of one part, in the unit of _core_parts or _gpu_parts
    by_blocks: NDArray[np.bool_]  # whether a part is cut between KV blocks instead of rows
    grain_blocks: int  # number of KV blocks in the smallest item


def _core_parts(dims: Dims, tiles: _Tiles) -> _Parts:
    """Divide tiles into parts for CPU cores. The cost of a part is its number of multiply-adds: rows x KV tokens."""
    before = tiles.first * dims.bucket.kv_block
    cost = tiles.rows * np.where(tiles.seq < 0, 1, tiles.position + tiles.rows - before)
    share = dims.split.rank_kv_heads * int(cost.sum()) / dims.bucket.attention_slots
    return _Parts(np.ones_like(cost), cost, (tiles.rows == 1) | (cost > share * tiles.rows), SPLIT_GRAIN)


def _gpu_parts(dims: Dims, tiles: _Tiles) -> _Parts:
    """Divide tiles into parts for SMs. Parts are cut between KV blocks, never between rows: an SM takes
    as long for a part of a KV block, or of its units, as for all of it.

    A part gets at most the number of KV heads that fill all units. This number is reduced until one KV block of the
    part is a small fraction of a slot's share, because cuts between large blocks would make the shares unequal. But
    PASS_HEADS heads, which keep memory busy, are always allowed if there are enough blocks for all slots.
    """
    heads, blocks = dims.split.rank_kv_heads, np.maximum(tiles.blocks, 1)
    units = -(-tiles.rows * dims.model.group_size // pages.QUERY_TILE)  # of one head
    share = heads * int(blocks.sum()) / dims.bucket.attention_slots
    most = np.clip(pages.UNITS // units, 1, max(SLACK * share, min(PASS_HEADS, share / (1 - SLACK)), 1))
    divisors = np.array([n for n in range(1, heads + 1) if heads % n == 0])
    wide = divisors[np.searchsorted(divisors, most, side="right") - 1]
    passes = -(-wide * units // pages.UNITS)
    return _Parts(wide, blocks * np.maximum(wide, PASS_HEADS * passes), np.ones_like(wide, dtype=bool), 1)


class _Line:
    """All work on one line (see the module's docstring). Its unit of length is a grain, which is never cut.

    A grain is a row, or a run of KV blocks if the part is cut between KV blocks. Arrays have one element per tile.
    """

    def __init__(self, dims: Dims, tiles: _Tiles, cut: _Cut) -> None:
        self.divided = divided = (_gpu_parts if target_of(dims).any_split else _core_parts)(dims, tiles)
        self.parts = dims.split.rank_kv_heads // divided.wide
        self.first_part = np.cumsum(self.parts) - self.parts
        by_blocks = np.maximum(-(-tiles.blocks // divided.grain_blocks), 1)
        self.grains = np.where(divided.by_blocks, by_blocks, tiles.rows)  # of a part
        if cut is not _Cut.INSIDE_PARTS:
            self.grains = np.ones_like(self.grains)
        self.borders = np.append(0, np.cumsum(self.parts * self.grains))  # of tiles
        self.share = int((self.parts * divided.cost).sum()) / dims.bucket.attention_slots  # cost of a slot


@dataclass(frozen=True)
class _Ends:
    """Where the shares of all slots but the last end. Each array has one element per slot."""

    tile: Ints
    part: Ints  # index of the part in its tile
    grain: Ints  # index of the first grain in the part that is not in the share any more
    border: Ints  # the part's border nearest to the end: 0, or the number of its grains


@dataclass(frozen=True)
class _Pieces:
    """The tiles, cut into items. Each array has one element per item."""

    slot: Ints  # in ascending order
    tile: Ints
    part: Ints  # index of the first part in its tile
    grain: Ints  # index of the first grain in the part
    length: Ints  # in grains
    line: _Line

    @property
    def partly(self) -> NDArray[np.bool_]:
        """Whether the item has only a part of a part. Otherwise it has one or more whole parts of its tile."""
        partly: NDArray[np.bool_] = self.length % self.line.grains[self.tile] != 0
        return partly


def _ends(dims: Dims, line: _Line, cut: _Cut) -> _Ends:
    """Divide the line into equal shares. An end close to a border of its part moves to the border."""
    parts, cost = line.parts, line.divided.cost
    cost_end = np.cumsum(parts * cost)
    at = line.share * np.arange(1, dims.bucket.attention_slots)
    tile = np.minimum(np.searchsorted(cost_end, at, side="right"), len(cost) - 1)
    progress = (at - (cost_end[tile] - parts[tile] * cost[tile])) / cost[tile]  # in parts of the tile
    if cut is _Cut.BETWEEN_TILES:
        progress = parts[tile] * np.rint(progress / parts[tile])
    part = np.clip(progress, 0, parts[tile] - 1).astype(np.int64)
    rest = progress - part
    nearest = np.rint(rest)
    border = nearest.astype(np.int64) * line.grains[tile]
    near = np.abs(rest - nearest) * cost[tile] <= SLACK * line.share
    return _Ends(tile, part, np.where(near, border, np.rint(rest * line.grains[tile]).astype(np.int64)), border)


def _unsplit(dims: Dims, tiles: _Tiles, line: _Line, ends: _Ends) -> _Ends:
    """Move ends to the borders of their parts where PARTIALS has no room for the results of further splits."""
    number = line.first_part[ends.tile] + ends.part
    split = (ends.grain > 0) & (ends.grain < line.grains[ends.tile]) & line.divided.by_blocks[ends.tile]
    numbers = np.unique(number[split])
    partials = np.repeat(tiles.rows * tiles.blocks * line.divided.wide, line.parts)  # of each part
    too_many = numbers[np.cumsum(partials[numbers]) > dims.bucket.partials]
    return replace(ends, grain=np.where(np.isin(number, too_many), ends.border, ends.grain))


def _pieces(dims: Dims, tiles: _Tiles, cut: _Cut) -> _Pieces:
    """Cut the tiles into items, at the ends of shares and at the borders of tiles and of parts that contain an end."""
    line = _Line(dims, tiles, cut)
    ends = _unsplit(dims, tiles, line, _ends(dims, line, cut))
    grains = line.grains[ends.tile]
    part_begin = line.borders[ends.tile] + ends.part * grains
    inside = (ends.grain > 0) & (ends.grain < grains)
    cuts = part_begin + ends.grain
    begin = np.unique(np.concatenate([line.borders, cuts, part_begin[inside], (part_begin + grains)[inside]]))
    begin, length = begin[:-1], np.diff(begin)  # the last border is the end of the line
    tile = np.searchsorted(line.borders, begin, side="right") - 1
    part, grain = np.divmod(begin - line.borders[tile], line.grains[tile])
    return _Pieces(np.searchsorted(cuts, begin, side="right"), tile, part, grain, length, line)


def _items(dims: Dims, tiles: _Tiles, pieces: _Pieces) -> dict[str, Ints]:
    """Return the items as a dict with a column for each step-table field."""
    line, of, partly = pieces.line, pieces.tile, pieces.partly
    divided, wide = line.divided, line.divided.wide[of]
    by_rows, split = partly & ~divided.by_blocks[of], partly & divided.by_blocks[of]
    row = tiles.row[of] + np.where(by_rows, pieces.grain, 0)
    rows = np.where(by_rows, pieces.length, tiles.rows[of])
    live = tiles.seq[of] >= 0
    position = tiles.position[of] + row - tiles.row[of]
    block, block_end = _seen(dims, position, position + rows - 1)
    first = tiles.first[of]
    block = np.where(split, first + pieces.grain * divided.grain_blocks, block)
    block_end = np.where(live, block_end, block)
    split_end = first + (pieces.grain + pieces.length) * divided.grain_blocks
    block_end = np.where(split, np.minimum(split_end, block_end), block_end)

    # An item waits for its own row block, and for those whose KV it reads.
    own = row // dims.bucket.row_block
    step_start = position - (row - tiles.chunk_row[of])  # position of the chunk's first row
    needed = tiles.chunk_row[of] + np.maximum(block * dims.bucket.kv_block - step_start, 0)
    reads_step = live & (block_end * dims.bucket.kv_block > step_start)
    wait = np.where(reads_step, np.minimum(needed // dims.bucket.row_block, own), own)

    items = {
        "item_row": row,
        "item_rows": rows,
        "item_kv_head": pieces.part * wide,
        "item_kv_heads": np.where(partly, 1, pieces.length // line.grains[of]) * wide,
        "item_seq": tiles.seq[of],
        "item_block": block,
        "item_blocks": block_end - block,
        "item_wait_block": wait,
        "item_wait_blocks": own - wait + 1,
        "item_split": np.full_like(row, -1),
        **{name: np.zeros_like(row) for name in ("item_splits", "item_partial", "item_span")},
    }
    if split.any():
        number = (line.first_part[of] + pieces.part)[split]
        _, one, index, count = np.unique(number, return_index=True, return_inverse=True, return_counts=True)
        span = tiles.blocks[of][split][one]
        partials = (rows * wide)[split][one] * span
        items["item_split"][split] = index
        items["item_splits"][split] = count[index]
        items["item_partial"][split] = (np.cumsum(partials) - partials)[index] - first[split]
        items["item_span"][split] = span[index]
    return items
