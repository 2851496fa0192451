"""Checks a step table against the conditions that programs, the verifier and backends rely on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError
from megakernel.isa import Dims, StepTable


def check_step(table: StepTable) -> None:
    """Check a step table before a launch, and raise a MegakernelError that names the first condition that it violates.

    Rows
    - Live rows (row_seq >= 0) come first. Padding rows have sequence -1, token 0 and position 0.
    - row_seq < max_seqs, 0 <= position < max_context, token < vocab. A token that is still being sampled is written as
      -1 - slot, with slot < max_seqs. The row reads this token from HISTORY[slot].
    - The rows of a sequence follow each other and have consecutive positions. So no two rows store K and V at the same
      place.
    - Page ids are >= 0. A page that one sequence writes is not used by any other.

    Attention items (units of attention work) of each rank, with KV heads counted from the rank's first one
    - slot_items ascends from 0. Its last entry is the number of items in use, at most `items`.
    - The rows of an item lie in one row block. All belong to its sequence, or all are padding. Its KV heads exist.
    - Each pair (token row, KV head) belongs to exactly one unsplit item or exactly one split. A split is a set of items
      that divide the KV blocks of the same rows.
    - A padding item has no KV blocks. An unsplit item covers all KV blocks that its rows attend to in any layer, up to
      the block of its last row. These blocks begin at 0 unless all layers have sliding windows.
    - All items of a split have the same rows, heads, sequence, item_partial and item_span. item_splits is the number of
      these items, and item_span the number of KV blocks that an unsplit item would have. Together, the items cover each
      of these blocks exactly once. Split indices are < items. Each split has its own range inside PARTIALS.
    - An item waits for its own row block, and for the row blocks of all rows of this step whose KV it reads.

    Logit rows
    - logit_rows are live rows, or -1. Bias ranges lie inside bias_entries, and bias ids in the vocabulary.
    - Sampling values are finite and in range: temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, top_k >= 0,
      repetition_penalty > 0, prompt_length >= 0, choice >= 0; bias is not NaN or +inf; target < vocab.
    - mask_count is at most mask_rows. The mask of a row is at most mask_count.
    - Each sampled token goes to its own place of HISTORY, or nowhere, and never to a place that this step reads.
    - Two kinds of rows read HISTORY. A row whose token is still being sampled reads the place of this token. A row that
      samples with penalties has a history slot, and reads all places of this slot before its sample position. The row
      may store its own token in another slot, or not at all.
    """
    _check_rows(table)
    for rank in range(table.dims.split.tp):
        _check_items(table.rank(rank))
    _check_logit_rows(table)


def _require(holds: Any, what: str) -> None:
    if not np.all(holds):
        raise MegakernelError(f"invalid step table: {what}")


def _check_rows(t: StepTable) -> None:
    d = t.dims
    live = t.row_seq >= 0
    rows = int(live.sum())
    _require(live[:rows], "live rows do not come first")
    _require(t.row_seq[rows:] == -1, "a padding row's sequence is not -1")
    _require((t.token_ids[rows:] == 0) & (t.positions[rows:] == 0), "a padding row's token or position is not 0")
    _require(t.row_seq < d.bucket.max_seqs, "a row's sequence is outside max_seqs")
    _require((t.positions >= 0) & (t.positions < d.bucket.max_context), "a position is outside max_context")
    _require((t.token_ids >= -d.bucket.max_seqs) & (t.token_ids < d.model.vocab), "a token is outside the vocabulary")
    _require(t.block_tables >= 0, "a page id is negative")

    seq, position = t.row_seq[:rows], t.positions[:rows]
    new = np.append(True, seq[1:] != seq[:-1])[:rows]
    _require(len(np.unique(seq)) == new.sum(), "a sequence's rows are not one run")
    _require(new[1:] | (np.diff(position) == 1), "a sequence's positions are not consecutive")
    first = np.flatnonzero(new)
    if rows:
        last = np.append(first[1:], rows) - 1
        _check_pages(t, seq[first], position[first], position[last])


def _check_pages(t: StepTable, seq: NDArray[Any], start: NDArray[Any], last: NDArray[Any]) -> None:
    """Check the KV pages of the sequences `seq`, which write positions `start` to `last` and read all earlier ones that
    they see in some layer."""
    index, bucket = np.arange(t.dims.bucket.pages_per_seq), t.dims.bucket
    tables = t.block_tables[seq]
    first = t.dims.first_block(start) * (bucket.kv_block // bucket.kv_page)
    used = (index >= first[:, None]) & (index <= (last // bucket.kv_page)[:, None])
    written = used & (index >= (start // bucket.kv_page)[:, None])
    owner = np.broadcast_to(np.arange(len(seq))[:, None], tables.shape)
    pages = tables[written]
    order = np.argsort(pages, kind="stable")
    pages, owners = pages[order], owner[written][order]
    _require(np.diff(pages) != 0, "a page is written twice")
    at = np.minimum(np.searchsorted(pages, tables[used]), len(pages) - 1)
    foreign = (pages[at] == tables[used]) & (owners[at] != owner[used])
    _require(~foreign, "a page that one sequence writes is used by another")
    # If a sequence had one page twice, for older tokens and for new ones, it would overwrite its own tokens.
    older = used & ~written
    at = np.minimum(np.searchsorted(pages, tables[older]), len(pages) - 1)
    _require(pages[at] != tables[older], "a page is written and also an older page of its sequence")


def _check_items(t: StepTable) -> None:
    d = t.dims
    n = int(t.slot_items[-1])
    ascends = t.slot_items[0] == 0 and n <= d.bucket.items and np.all(np.diff(t.slot_items) >= 0)
    _require(ascends, "slot_items does not ascend")
    row, rows, head, heads = (x[:n] for x in (t.item_row, t.item_rows, t.item_kv_head, t.item_kv_heads))
    seq, block, blocks = t.item_seq[:n], t.item_block[:n], t.item_blocks[:n]
    _require((row >= 0) & (rows > 0) & (row + rows <= d.bucket.tokens), "an item's rows are outside tokens")
    exists = (head >= 0) & (heads > 0) & (head + heads <= d.split.rank_kv_heads)
    _require(exists, "an item's heads are outside those of the rank")
    last = row + rows - 1
    _require(row // d.bucket.row_block == last // d.bucket.row_block, "an item's rows cross a row block")
    _require((t.row_seq[row] == seq) & (t.row_seq[last] == seq), "an item's rows are not of its sequence")

    live, split = seq >= 0, t.item_split[:n]
    first = d.first_block(t.positions[row])
    whole = np.where(live, t.positions[last] // d.bucket.kv_block + 1 - first, 0)
    unsplit = split < 0
    _require(split >= -1, "a split index is below -1")
    covers = (block == first) & (blocks == whole)
    _require(covers[unsplit], "an unsplit item does not cover its KV")
    once = _check_splits(t, n, first, whole)

    cover = np.zeros((d.bucket.tokens + 1, d.split.rank_kv_heads + 1), np.int32)
    r, e, h, f = row[once], (row + rows)[once], head[once], (head + heads)[once]
    for at, sign in (((r, h), 1), ((r, f), -1), ((e, h), -1), ((e, f), 1)):
        np.add.at(cover, at, sign)
    cover = cover.cumsum(axis=0).cumsum(axis=1)
    _require(cover[:-1, :-1] == 1, "the items do not partition rows x KV heads")

    wait, wait_end = t.item_wait_block[:n], t.item_wait_block[:n] + t.item_wait_blocks[:n]
    own = row // d.bucket.row_block
    _require((wait >= 0) & (wait <= own) & (own < wait_end), "an item does not wait for its own row block")
    _require(wait_end <= d.bucket.row_blocks, "an item waits for a row block that does not exist")
    runs, first = np.unique(t.row_seq, return_index=True)
    chunk_row = first[np.searchsorted(runs, seq)]
    start = t.positions[chunk_row]
    low = chunk_row + np.maximum(block * d.bucket.kv_block - start, 0)
    high = np.minimum(chunk_row + (block + blocks) * d.bucket.kv_block - start - 1, last)
    reads = live & (high >= chunk_row)
    covered = (wait <= low // d.bucket.row_block) & (high // d.bucket.row_block < wait_end)
    _require(covered | ~reads, "an item does not wait for the rows whose KV it reads")


def _check_splits(t: StepTable, n: int, first: NDArray[Any], whole: NDArray[Any]) -> NDArray[Any]:
    """Check the splits, the sets of items that divide the KV blocks of the same rows. Return a mask of all unsplit
    items and the first item of each split."""
    d = t.dims
    once = np.ones(n, bool)
    taken = np.zeros(d.bucket.partials, bool)
    for index in np.unique(t.item_split[:n][t.item_split[:n] >= 0]):
        pieces = np.flatnonzero(t.item_split[:n] == index)
        one = pieces[0]
        once[pieces[1:]] = False
        _require(index < d.bucket.items, "a split index is outside items")
        _require(t.item_splits[pieces] == len(pieces), "the number of a split's items is not item_splits")
        for name in ("row", "rows", "kv_head", "kv_heads", "seq", "partial", "span"):
            column = getattr(t, f"item_{name}")[pieces]
            _require(column == column[0], f"a split's items differ in {name}")
        _require(t.item_span[one] == whole[one] and t.item_seq[one] >= 0, "a split's span is not that of its rows")
        order = pieces[np.argsort(t.item_block[pieces])]
        ends = t.item_block[order] + t.item_blocks[order]
        starts = np.append(first[one], ends[:-1])
        _require((t.item_blocks[pieces] > 0), "a split has an empty item")
        covers = (t.item_block[order] == starts) & (ends[-1] == first[one] + whole[one])
        _require(covers, "a split does not cover its KV blocks once")
        begin = int(t.item_partial[one] + first[one])
        end = begin + int(t.item_rows[one] * t.item_kv_heads[one] * t.item_span[one])
        _require(begin >= 0 and end <= d.bucket.partials, "a split's partials are outside PARTIALS")
        _require(~taken[begin:end], "two splits share partials")
        taken[begin:end] = True
    return once


def _check_logit_rows(t: StepTable) -> None:
    d = t.dims
    live = int((t.row_seq >= 0).sum())
    _require((t.logit_rows >= -1) & (t.logit_rows < live), "a logit row is not a live row")
    _require((t.sample_slot >= -1) & (t.sample_slot < d.bucket.max_seqs), "a sample slot is outside max_seqs")
    _require((t.history_slot >= -1) & (t.history_slot < d.bucket.max_seqs), "a history slot is outside max_seqs")
    stored = t.sample_slot >= 0
    _require(~stored | (t.logit_rows >= 0), "the sample of a padding logit row is stored")
    inside = (t.sample_position >= 0) & (t.sample_position <= d.bucket.max_context)
    unused = ~(stored | (t.history_slot >= 0))
    _require(unused | inside, "a sample is stored, or penalties are read, outside HISTORY")
    _require((t.target >= -1) & (t.target < d.model.vocab), "a target is outside the vocabulary")
    _require((t.prompt_length >= 0) & (t.top_k >= 0) & (t.choice >= 0), "a prompt length, top_k or choice is negative")
    ranges = {
        "temperature": (t.temperature >= 0) & np.isfinite(t.temperature),
        "top_p": (t.top_p > 0) & (t.top_p <= 1),
        "min_p": (t.min_p >= 0) & (t.min_p <= 1),
        "presence_penalty": np.isfinite(t.presence_penalty),
        "frequency_penalty": np.isfinite(t.frequency_penalty),
        "repetition_penalty": (t.repetition_penalty > 0) & np.isfinite(t.repetition_penalty),
    }
    for name, holds in ranges.items():
        _require(holds, f"{name} is out of range")
    ordered = (t.bias_begin >= 0) & (t.bias_begin <= t.bias_end) & (t.bias_end <= d.bucket.bias_entries)
    _require(ordered, "a bias range is wrong")
    _require((t.bias_ids >= 0) & (t.bias_ids < d.model.vocab), "a bias token is outside the vocabulary")
    _require(t.bias_values < np.inf, "a bias is NaN or +inf")
    _require((t.mask_count >= 0) & (t.mask_count <= d.bucket.mask_rows), "more masks are in use than there are")
    _require((t.mask >= 0) & (t.mask <= t.mask_count), "a row's mask is not in use")
    _check_history(t, d, stored)


def _check_history(t: StepTable, d: Dims, stored: NDArray[Any]) -> None:
    width = d.bucket.max_context + 1
    places = np.sort(t.sample_slot[stored].astype(np.int64) * width + t.sample_position[stored])
    _require(np.diff(places) != 0, "two samples are stored in one place")
    deferred = t.token_ids < 0
    read = (-1 - t.token_ids[deferred]).astype(np.int64) * width + t.positions[deferred]
    _require(~np.isin(read, places), "a deferred token is sampled in the same step")
    penalised = (t.repetition_penalty != 1) | (t.presence_penalty != 0) | (t.frequency_penalty != 0)
    penalised &= (t.logit_rows >= 0) & (t.target < 0)
    _require(~penalised | (t.history_slot >= 0), "a row with penalties has no history slot")
    first = t.history_slot[penalised].astype(np.int64) * width
    last = first + t.sample_position[penalised]
    inside = np.searchsorted(places, last) - np.searchsorted(places, first)
    _require(inside == 0, "a penalised row reads a token that is sampled in the same step")
