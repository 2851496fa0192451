"""Divides the attention of a step (rows x KV heads x KV tokens) into equal shares, one per attention instruction.

A share consists of items. An item is some rows of one sequence, some KV heads, and some consecutive KV blocks (of 128
tokens each). The list of items of one instruction is called a slot. Each rank has its own items, for its own KV heads.

The division has three steps:

1. The rows are grouped into query tiles, and the KV heads of each tile into groups called parts.
2. All work is laid out on a line, tile after tile. Within a tile, part follows part.
3. The line is cut into equal lengths, one per slot. A cut inside a tile falls between two parts or inside a part.
   Inside a part, it falls between two rows or between two KV blocks.

If a part is cut between KV blocks, the partial results of its items must be merged. Such a part is called a split.
There are at most as many items as tiles, plus three per slot.

A CPU core processes one KV head after another, so there a part is one head. An SM processes `pages.UNITS` units at the
same time. A unit is `pages.QUERY_TILE` pairs (query row, query head) that use one KV head. If a tile has too few rows
to fill all units with one KV head, a part has several heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dims, StepTable, Units
from ..targets import pages

Ints = NDArray[np.signedinteger]
# The attention items of all ranks. Ranks with equally many KV heads have the same items, so the key is the number of
# KV heads. The value has the items as columns of the step table, and the index of each instruction's first item.
Dealt = dict[int, tuple[dict[str, Ints], Ints]]

# A CPU processes queries in tiles of this many rows, which share each read of K and V. With 32 rows, a loaded element
# is used in enough multiply-adds to hide its load. The attention scores of a tile still fit into a core's L1 cache.
QUERY_TILE = 32
# On a CPU, the KV range of a query tile may be divided among cores, but each gets at least this many KV blocks of 128
# tokens. With fewer, merging the partial results would cost more time than is saved. On a GPU, the minimum is 1 block:
# a block takes longer than the merging, and with few rows most SMs would otherwise be idle.
SPLIT_GRAIN = 2
# While an SM computes with one KV block (128 tokens), it can load K and V of about this many KV heads. With fewer,
# memory would idle. On an H200, computing takes 3 us: softmax, and 8 query tiles of 16 queries x 128 tokens x 128
# elements x 4 FLOP at 60 % of an SM's 7.5 TFLOP/s. Loading K and V of one head takes 1.8 us: 64 KiB at an SM's 36 GB/s.
PASS_HEADS = 2
# Attention work is divided into equal shares, one per instruction. To cut fewer parts (KV heads of a query tile) in
# two, the end of a share may move to a nearby border between parts. It moves by at most this fraction of a share, so
# that shares stay nearly equal.
SLACK = 1 / 8


@dataclass(frozen=True)
class _Tiles:
    """Query tiles. Each array has one element per tile. A tile has consecutive token rows inside one row block, either
    rows of one sequence or padding rows (`seq` is -1)."""

    row: Ints
    rows: Ints
    seq: Ints
    position: Ints  # position of the tile's first row in its sequence; 0 for padding
    chunk_row: Ints  # first row of the sequence's chunk that contains the tile
    first: Ints  # first KV block to which the tile attends in any layer; 0 unless all layers have sliding windows
    blocks: Ints  # number of KV blocks from `first` to the last row's position; 0 for padding


def moves(dims: Dims, position: Ints) -> bool:
    """Whether any token at one of these positions attends to other KV blocks than the token before it does."""
    block, window = dims.bucket.kv_block, max(dims.model.spans)
    moved = position % block == 0
    if window < dims.bucket.max_context:
        moved |= (position >= window) & ((position + 1 - window) % block == 0)
    return bool(np.count_nonzero(moved))


def _seen(dims: Dims, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the KV blocks [begin, end) to which tokens at positions `first` to `last` attend in any layer."""
    return dims.first_block(first), last // dims.bucket.kv_block + 1


def deal_items(dims: Dims, seq: Ints, start: Ints, count: Ints) -> Dealt:
    """Compute the attention items of every rank. A chunk is the tokens of a sequence in this step: chunk i has
    `count[i]` rows of sequence `seq[i]`, from position `start[i]` on. Chunks must be in row order.

    If there is no room for more partial results, fewer sequences are divided among several items. Raises
    MegakernelError if there are more items than the program allows. Token rows + 3 × slots are always enough items.
    """
    by_heads = {rank.split.rank_kv_heads: rank for rank in dims.ranks if rank.split.rank_kv_heads}
    return {heads: _deal(rank, seq, start, count) for heads, rank in by_heads.items()}


def write_items(table: StepTable, dealt: Dealt) -> None:
    """Write the attention items to the step table, for every rank. `dealt` is the result of `deal_items`."""
    for rank in range(table.dims.split.tp):
        view = table.rank(rank)
        view.item_split[:] = -1
        if heads := view.dims.split.rank_kv_heads:
            items, view.slot_items[:] = dealt[heads]
            for name, column in items.items():
                getattr(view, name)[: len(column)] = column


def _deal(dims: Dims, seq: Ints, start: Ints, count: Ints) -> tuple[dict[str, Ints], Ints]:
    """Return the attention items of one rank, as a dict of step-table columns, and the first item of each slot."""
    tiles = _tile(dims, seq, start, count, QUERY_TILE if dims.worker.units == Units.CORE else pages.pass_rows(dims))
    pieces = _pieces(dims, tiles)
    if len(pieces.slot) > dims.bucket.items:
        raise MegakernelError(
            f"the step needs {len(pieces.slot)} attention items, but the program was compiled for at most "
            f"{dims.bucket.items}: give the step fewer tokens"
        )
    return _items(dims, tiles, pieces), np.searchsorted(pieces.slot, np.arange(dims.bucket.attention_slots + 1))


def _tile(dims: Dims, seq: Ints, start: Ints, count: Ints, tile_rows: int) -> _Tiles:
    live = int(count.sum())
    # The padding rows count as one more chunk at the end.
    chunk_row = np.append(np.cumsum(count) - count, live)
    seq, start = np.append(seq, -1), np.append(start, 0)
    run = _distinct(chunk_row, np.arange(0, dims.bucket.tokens, dims.bucket.row_block))
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


def _distinct(*arrays: Ints) -> Ints:
    """The distinct values of arrays, in ascending order. `np.unique` takes four times as long."""
    values: Ints = np.sort(np.concatenate(arrays))
    return np.compress(np.append(True, values[1:] > values[:-1]), values)


@dataclass(frozen=True)
class _Parts:
    """How query tiles are divided into parts, which are groups of KV heads. Each array has one element per tile."""

    wide: Ints  # number of KV heads in a part; a divisor of the rank's KV heads
    cost: Ints  # cost of a part, in a unit that differs between CPUs and GPUs
    by_blocks: NDArray[np.bool_]  # whether a part may be cut between KV blocks; otherwise only between rows
    grain_blocks: int  # cuts between KV blocks are at multiples of this number of blocks from the tile's first


def _core_parts(dims: Dims, tiles: _Tiles) -> _Parts:
    """For CPUs, make each KV head of a query tile a part. Its cost is its number of (query row, KV token) pairs."""
    before = tiles.first * dims.bucket.kv_block
    cost = tiles.rows * np.where(tiles.seq < 0, 1, tiles.position + tiles.rows - before)
    share = dims.split.rank_kv_heads * int(cost.sum()) / dims.bucket.attention_slots
    return _Parts(np.ones_like(cost), cost, (tiles.rows == 1) | (cost > share * tiles.rows), SPLIT_GRAIN)


def _gpu_parts(dims: Dims, tiles: _Tiles) -> _Parts:
    """Divide tiles into parts (groups of KV heads) for SMs. A part can be cut only between KV blocks, not between rows:
    an SM takes the same time for a KV block even if the part has few rows.

    A part should have enough KV heads for all warps of the SM. It has fewer heads if one KV block of so many heads is
    too much work to divide evenly among the instructions. But if there are enough blocks for all instructions, a part
    has at least PASS_HEADS heads: loads for fewer heads do not keep memory busy."""
    heads, blocks = dims.split.rank_kv_heads, np.maximum(tiles.blocks, 1)
    units = pages.head_units(tiles.rows, dims)
    share = heads * int(blocks.sum()) / dims.bucket.attention_slots
    most = np.clip(pages.UNITS // units, 1, max(SLACK * share, min(PASS_HEADS, share / (1 - SLACK)), 1))
    divisors = np.array([n for n in range(1, heads + 1) if heads % n == 0])
    wide = divisors[np.searchsorted(divisors, most, side="right") - 1]
    passes = -(-wide * units // pages.UNITS)
    return _Parts(wide, blocks * np.maximum(wide, PASS_HEADS * passes), np.ones_like(wide, dtype=bool), 1)


class _Line:
    """All attention work, one query tile after another, to be cut into equal shares. Arrays have one element per tile.

    Work is counted in grains. A grain is never cut. It is a few consecutive KV blocks if the part (group of KV heads)
    may be cut between KV blocks, otherwise one row."""

    def __init__(self, dims: Dims, tiles: _Tiles) -> None:
        self.divided = divided = (_core_parts if dims.worker.units == Units.CORE else _gpu_parts)(dims, tiles)
        self.parts = dims.split.rank_kv_heads // divided.wide
        self.first_part = np.cumsum(self.parts) - self.parts
        by_blocks = np.maximum(-(-tiles.blocks // divided.grain_blocks), 1)
        self.grains = np.where(divided.by_blocks, by_blocks, tiles.rows)  # of a part
        self.borders = np.append(0, np.cumsum(self.parts * self.grains))  # of tiles
        self.share = int((self.parts * divided.cost).sum()) / dims.bucket.attention_slots  # cost of a slot


@dataclass(frozen=True)
class _Pieces:
    """The attention items into which the query tiles are divided. Each array has one element per item."""

    slot: Ints  # in ascending order
    tile: Ints
    part: Ints  # index in the tile of the item's first part (group of KV heads)
    grain: Ints  # index in this part of the item's first grain (row or run of KV blocks)
    length: Ints  # in grains
    line: _Line


def _ends(dims: Dims, tiles: _Tiles, line: _Line) -> tuple[Ints, Ints, Ints]:
    """Divide attention work equally among slots. Return where the share of each slot except the last ends: the tile,
    the index in the tile of the part (group of KV heads), and the index in the part of the next share's first grain. A
    share ends at a border of parts if one is near. If partial results of cut parts need too much room, some of the cuts
    move to borders."""
    parts, cost = line.parts, line.divided.cost
    cost_end = np.cumsum(parts * cost)
    at = line.share * np.arange(1, dims.bucket.attention_slots)
    tile = np.minimum(np.searchsorted(cost_end, at, side="right"), len(cost) - 1)
    progress = (at - (cost_end[tile] - parts[tile] * cost[tile])) / cost[tile]  # measured in parts of the tile
    part = np.clip(progress, 0, parts[tile] - 1).astype(np.int64)
    rest = progress - part
    nearest = np.rint(rest)
    border = nearest.astype(np.int64) * line.grains[tile]
    near = np.abs(rest - nearest) * cost[tile] <= SLACK * line.share
    grain = np.where(near, border, np.rint(rest * line.grains[tile]).astype(np.int64))
    number = line.first_part[tile] + part
    split = (grain > 0) & (grain < line.grains[tile]) & line.divided.by_blocks[tile]
    numbers = np.unique(number[split])
    partials = np.repeat(tiles.rows * tiles.blocks * line.divided.wide, line.parts)  # of each part
    too_many = numbers[np.cumsum(partials[numbers]) > dims.bucket.partials]
    return tile, part, np.where(np.isin(number, too_many), border, grain)


def _pieces(dims: Dims, tiles: _Tiles) -> _Pieces:
    """Cut the work into items: at shares' ends, between tiles, and before and after each part with an end inside."""
    line = _Line(dims, tiles)
    tile, part, grain = _ends(dims, tiles, line)
    grains = line.grains[tile]
    part_begin = line.borders[tile] + part * grains
    inside = (grain > 0) & (grain < grains)
    cuts = part_begin + grain
    begin = _distinct(line.borders, cuts, part_begin[inside], (part_begin + grains)[inside])
    begin, length = begin[:-1], np.diff(begin)  # the last border is the end of the line, where no item begins
    tile = np.searchsorted(line.borders, begin, side="right") - 1
    part, grain = np.divmod(begin - line.borders[tile], line.grains[tile])
    return _Pieces(np.searchsorted(cuts, begin, side="right"), tile, part, grain, length, line)


def _items(dims: Dims, tiles: _Tiles, pieces: _Pieces) -> dict[str, Ints]:
    """Return the items as a dict with a column for each item field of the step table."""
    line, of = pieces.line, pieces.tile
    divided, wide = line.divided, line.divided.wide[of]
    partly = pieces.length % line.grains[of] != 0  # an item is less than one part; all others have whole parts
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

    # An item waits for the row block of its query rows, and for the row blocks of this step whose K and V it reads.
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
