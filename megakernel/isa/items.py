"""Computes the FLOPs and the bytes read of attention items. They depend on the step table, not on the program."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .costs import attention_cost
from .step import StepTable

Floats = NDArray[np.float64]


def ragged(counts: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the elements of lists of the given lengths. Return for each element its list and its place in it."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)


def item_work(view: StepTable) -> tuple[Floats, Floats]:
    """Return two arrays [items] for the attention items of the view's rank: the FLOPs of each item,
    and the bytes of K and V that it reads. Both are zero for padding items.

    A row attends to earlier tokens and to itself. An item reads K and V once, however many rows the
    item has.
    """
    dims, n = view.dims, int(view.slot_items[-1])
    row, rows = view.item_row[:n].astype(np.int64), view.item_rows[:n].astype(np.int64)
    live = view.item_seq[:n] >= 0
    begin = view.item_block[:n].astype(np.int64) * dims.kv_block
    end = begin + view.item_blocks[:n].astype(np.int64) * dims.kv_block
    of, nth = ragged(rows)
    sees = np.clip(view.positions[row[of] + nth] + 1 - begin[of], 0, (end - begin)[of])
    pairs = np.bincount(of, weights=sees, minlength=n)
    tokens = np.maximum(np.minimum(view.positions[row + rows - 1].astype(np.int64) + 1, end) - begin, 0)
    per_pair, per_token = attention_cost(dims, 1, 1.0)
    first, heads = view.item_kv_head[:n].astype(np.int64), np.where(live, view.item_kv_heads[:n], 0)
    # Several ranks may use the same KV head, each for some of the query heads that share it. So only
    # the query heads of this rank are counted.
    query_heads = [end - begin for begin, end in map(dims.query_heads, range(dims.rank_kv_heads))]
    before = np.cumsum([0, *query_heads])
    asked = (before[first + heads] - before[first]) / dims.group_size
    return per_pair * asked * pairs, per_token * heads.astype(np.float64) * tokens


def slot_work(table: StepTable) -> Floats:
    """Return the work of each attention slot (list of items) in one layer: [ranks, slots, 2]. The two
    numbers are the FLOPs of all its items, and the bytes of K and V that they read.
    """
    dims = table.dims
    out = np.zeros((dims.tp, dims.attention_slots, 2))
    for rank in range(dims.tp):
        view = table.rank(rank)
        slot = np.repeat(np.arange(dims.attention_slots), np.diff(view.slot_items))
        for i, amount in enumerate(item_work(view)):
            out[rank, :, i] = np.bincount(slot, weights=amount, minlength=dims.attention_slots)
    return out
