"""Divides a step's attention (rows x KV heads x KV tokens) into equal shares of work, one for each attention slot.

An attention slot is the list of work items of one attention instruction. Each rank has its own items,
for the KV heads that its query heads use.

Rows are first grouped into query tiles, and the KV heads of a tile into parts. All work is then
laid out on one line: tile after tile, and within a tile part after part. The line is divided into
equal lengths, one per slot. If a slot's share ends inside a tile, the tile is cut there, either between
two parts or inside a part. A cut inside a part lies between two rows or between two KV blocks. A
part that is cut between KV blocks is called a split. So there are at most as many items as tiles, plus
three per slot.

A CPU core processes one KV head after another, so a part is one head. An SM computes `pages.UNITS`
units side by side. A unit has `pages.QUERY_TILE` (query row, query head) pairs. In a full tile for an
SM, one KV head has enough pairs to fill all units. In a tile with fewer rows, a part has several KV
heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims, StepTable, ceil_div
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
    """The query tiles, one array element for each. A tile consists of consecutive rows of one
    chunk, or of padding (`seq` is -1), inside one row block.
    """

    row: Ints
    rows: Ints
    seq: Ints
    position: Ints  # position of the first row in its sequence; 0 for padding
    chunk_row: Ints  # first row of the chunk to which the tile belongs
    blocks: Ints  # KV blocks up to the last row's position; 0 for padding


def deal_items(dims: Dims, seq: Ints, start: Ints, count: Ints) -> Dealt:
    """Compute every rank's items. Chunk i has `count[i]` rows of sequence `seq[i]`, which begin at
    position `start[i]`.

    Chunks are in row order. If `dims.items` is too small, tiles are cut more coarsely; if `dims.partials` is too small,
    fewer parts are split. Raises MegakernelError if not even one item per chunk and row block fits.
    """
    ranks = (dims if rank == dims.rank else replace(dims, rank=rank) for rank in range(dims.tp))
    by_heads = {rank.rank_kv_heads: rank for rank in ranks if rank.rank_kv_heads}
    return {heads: _deal(rank, seq, start, count) for heads, rank in by_heads.items()}


def write_items(table: StepTable, dealt: Dealt) -> None:
    """Write the result of `deal_items` into every rank's slot_items and item_* fields."""
    for rank in range(table.dims.tp):
        view = table.rank(rank)
        view.item_split[:] = -1
        if heads := view.dims.rank_kv_heads:
            items, view.slot_items[:] = dealt[heads]
            for name, column in items.items():
                getattr(view, name)[: len(column)] = column


def _deal(dims: Dims, seq: Ints, start: Ints, count: Ints) -> tuple[dict[str, Ints], Ints]:
    """Return the items of one rank as a dict with a column for each step-table field, and the rank's slot_items."""
    query_rows = max(1, pages.UNITS * pages.QUERY_TILE // dims.group_size) if target_of(dims).pages else QUERY_TILE
    for tile_rows in (query_rows, dims.row_block):
        tiles = _tile(dims, seq, start, count, tile_rows)
        for cut in _Cut:
            items, slots = _cut(dims, tiles, cut)
            if len(slots) <= dims.items:
                return items, np.searchsorted(slots, np.arange(dims.attention_slots + 1))
    raise MegakernelError(
        f"the step needs {len(tiles.row)} attention items, but the program was compiled for at most {dims.items}"
    )


def _tile(dims: Dims, seq: Ints, start: Ints, count: Ints, tile_rows: int) -> _Tiles:
    live = int(count.sum())
    # Padding is treated as one more chunk at the end.
    chunk_row = np.append(np.cumsum(count) - count, live)
    seq, start = np.append(seq, -1), np.append(start, 0)
    run = np.union1d(chunk_row, np.arange(0, dims.tokens, dims.row_block))
    run = run[run < dims.tokens]
    run_end = np.append(run[1:], dims.tokens)
    pieces = np.where(run < live, -(-(run_end - run) // tile_rows), 1)
    of = np.repeat(np.arange(len(run)), pieces)
    row = run[of] + tile_rows * (np.arange(len(of)) - (np.cumsum(pieces) - pieces)[of])
    rows = np.where(run < live, tile_rows, dims.row_block)[of]
    rows = np.minimum(rows, run_end[of] - row)
    chunk = np.searchsorted(chunk_row, row, side="right") - 1
    position = np.where(row < live, start[chunk] + row - chunk_row[chunk], 0)
    blocks = np.where(row < live, ceil_div(position + rows, dims.kv_block), 0)
    return _Tiles(row, rows, seq[chunk], position, chunk_row[chunk], blocks)


@dataclass(frozen=True)
class _Parts:
    """The division of tiles into parts. Each array has one element per tile."""

    wide: Ints  # number of KV heads in a part; a divisor of the rank's KV heads
    cost: Ints  # cost of one part, in the unit of _core_parts or _gpu_parts
    by_blocks: NDArray[np.bool_]  # whether a part is cut between KV blocks instead of rows
    grain_blocks: int  # number of KV blocks in the smallest item


def _core_parts(dims: Dims, tiles: _Tiles) -> _Parts:
    """Divide tiles into parts for CPU cores. The cost of a part is its number of multiply-adds: rows x KV tokens."""
    cost = tiles.rows * np.where(tiles.seq < 0, 1, tiles.position + tiles.rows)
    share = dims.rank_kv_heads * int(cost.sum()) / dims.attention_slots
    return _Parts(np.ones_like(cost), cost, (tiles.rows == 1) | (cost > share * tiles.rows), SPLIT_GRAIN)


def _gpu_parts(dims: Dims, tiles: _Tiles) -> _Parts:
    """Divide tiles into parts for SMs. Parts are cut between KV blocks, never between rows: an SM takes
    as long for a part of a KV block, or of its units, as for all of it.

    A part gets at most the number of KV heads that fill all units. This number is reduced until one KV
    block of the part is a small fraction of a slot's share, because cuts between large blocks would make
    the shares unequal. But PASS_HEADS heads, which keep memory busy, are always allowed if there are
    enough blocks for all slots.
    """
    heads, blocks = dims.rank_kv_heads, np.maximum(tiles.blocks, 1)
    units = -(-tiles.rows * dims.group_size // pages.QUERY_TILE)  # of one head
    share = heads * int(blocks.sum()) / dims.attention_slots
    most = np.clip(pages.UNITS // units, 1, max(SLACK * share, min(PASS_HEADS, share / (1 - SLACK)), 1))
    divisors = np.array([n for n in range(1, heads + 1) if heads % n == 0])
    wide = divisors[np.searchsorted(divisors, most, side="right") - 1]
    passes = -(-wide * units // pages.UNITS)
    return _Parts(wide, blocks * np.maximum(wide, PASS_HEADS * passes), np.ones_like(wide, dtype=bool), 1)


def _cut(dims: Dims, tiles: _Tiles, cut: _Cut) -> tuple[dict[str, Ints], Ints]:
    """Cut the tiles into items. Return the items as a dict with a column for each step-table field, and the slot of
    each item, in ascending order.

    The unit of length on the line of all work (see the module's docstring) is a grain, which is never cut. A grain is
    a row, or a run of KV blocks if the part is cut between KV blocks (`by_blocks`).
    """
    divided = (_gpu_parts if target_of(dims).any_split else _core_parts)(dims, tiles)
    wide, cost, by_blocks, grain_blocks = divided.wide, divided.cost, divided.by_blocks, divided.grain_blocks
    parts = dims.rank_kv_heads // wide
    first_part = np.cumsum(parts) - parts
    share = int((parts * cost).sum()) / dims.attention_slots
    grains = np.where(by_blocks, np.maximum(-(-tiles.blocks // grain_blocks), 1), tiles.rows)
    if cut is not _Cut.INSIDE_PARTS:
        grains = np.ones_like(grains)
    line = np.append(0, np.cumsum(parts * grains))

    # For the end of each slot's share, find the tile, the part of this tile, and the grain of this
    # part.
    cost_end = np.cumsum(parts * cost)
    at = share * np.arange(1, dims.attention_slots)
    tile = np.minimum(np.searchsorted(cost_end, at, side="right"), len(cost) - 1)
    progress = (at - (cost_end[tile] - parts[tile] * cost[tile])) / cost[tile]
    if cut is _Cut.BETWEEN_TILES:
        progress = parts[tile] * np.rint(progress / parts[tile])
    part = np.clip(progress, 0, parts[tile] - 1).astype(np.int64)
    rest = progress - part
    nearest = np.rint(rest)
    near = np.abs(rest - nearest) * cost[tile] <= SLACK * share
    border = nearest.astype(np.int64) * grains[tile]
    grain = np.where(near, border, np.rint(rest * grains[tile]).astype(np.int64))

    # A split part stores partial results in the PARTIALS buffer. If the buffer has no room for all
    # parts, the last ones are not split: their cuts move to the part's border.
    number = first_part[tile] + part
    inside = (grain > 0) & (grain < grains[tile])
    split = np.unique(number[inside & by_blocks[tile]])
    of_part = np.repeat(tiles.rows * tiles.blocks * wide, parts)
    too_many = split[np.cumsum(of_part[split]) > dims.partials]
    if len(too_many):
        unsplit = np.isin(number, too_many)
        grain = np.where(unsplit, border, grain)
        inside &= ~unsplit

    # An item begins and ends at a cut, at a border of a tile, or at a border of a part that contains a cut.
    part_start = line[tile] + part * grains[tile]
    ends = part_start + grain
    begin = np.unique(np.concatenate([line[:-1], ends, part_start[inside], (part_start + grains[tile])[inside]]))
    begin = begin[begin < line[-1]]
    slots = np.searchsorted(ends, begin, side="right")
    of = np.searchsorted(line, begin, side="right") - 1
    length = np.append(begin[1:], line[-1]) - begin
    part, grain = np.divmod(begin - line[of], grains[of])
    partly = length % grains[of] != 0

    by_rows = partly & ~by_blocks[of]
    row = tiles.row[of] + np.where(by_rows, grain, 0)
    rows = np.where(by_rows, length, tiles.rows[of])
    live = tiles.seq[of] >= 0
    position = tiles.position[of] + row - tiles.row[of]
    block_end = np.where(live, ceil_div(position + rows, dims.kv_block), 0)
    is_split = partly & by_blocks[of]
    block = np.where(is_split, grain * grain_blocks, 0)
    block_end = np.where(is_split, np.minimum((grain + length) * grain_blocks, block_end), block_end)

    own = row // dims.row_block
    step_start = position - (row - tiles.chunk_row[of])  # position of the chunk's first row
    needed = tiles.chunk_row[of] + np.maximum(block * dims.kv_block - step_start, 0)
    reads_step = live & (block_end * dims.kv_block > step_start)
    wait = np.where(reads_step, np.minimum(needed // dims.row_block, own), own)

    items = {
        "item_row": row,
        "item_rows": rows,
        "item_kv_head": part * wide[of],
        "item_kv_heads": np.where(partly, 1, length // grains[of]) * wide[of],
        "item_seq": tiles.seq[of],
        "item_block": block,
        "item_blocks": block_end - block,
        "item_wait_block": wait,
        "item_wait_blocks": own - wait + 1,
        "item_split": np.full_like(row, -1),
        "item_splits": np.zeros_like(row),
        "item_partial": np.zeros_like(row),
        "item_span": np.zeros_like(row),
    }
    if not is_split.any():
        return items, slots
    _, first, index, pieces = np.unique(
        (first_part[of] + part)[is_split], return_index=True, return_inverse=True, return_counts=True
    )
    span = tiles.blocks[of][is_split][first]
    partials = (rows * wide[of])[is_split][first] * span
    items["item_split"][is_split] = index
    items["item_splits"][is_split] = pieces[index]
    items["item_partial"][is_split] = (np.cumsum(partials) - partials)[index]
    items["item_span"][is_split] = span[index]
    return items, slots
