"""Writes the tables of successive steps, and rewrites only the fields that have changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..isa import Dims, StepTable
from .attention_items import Dealt, deal_items, write_items
from .rows import Rows, fill_rows, move_rows
from .sampling import Sampling


class Pages:
    """The ids of the KV pages of each slot's sequence. In row `slot` of `ids`, the first
    `count[slot]` are valid.

    Whoever changes the row of a slot must set `changed[:, slot]`, one flag for each of the two
    tables that `Steps` writes in turn.
    """

    def __init__(self, dims: Dims) -> None:
        self.ids = np.zeros((dims.max_seqs, dims.pages_per_seq), np.int32)
        self.count = np.zeros(dims.max_seqs, np.int32)
        self.changed = np.ones((2, dims.max_seqs), np.bool_)


@dataclass
class _Kept:
    """One of the two step tables, with the rows and the attention items that it contains. `rows` is None if the last
    attempt to write the table failed.
    """

    table: StepTable
    rows: Rows | None = None
    dealt: Dealt | None = None


class Steps:
    """Writes an engine's steps alternately into two step tables, so that a launch can read one
    while the other is written.

    While successive steps have the same lineup (sequences and their chunks) and every sequence continues by one token,
    a table needs only new tokens and positions. Its attention items stay the same until a row enters its next KV block.
    """

    def __init__(self, pages: Pages, sampling: Sampling) -> None:
        self._pages, self._sampling = pages, sampling
        self._kept: list[_Kept | None] = [None, None]
        self._turn = 0  # which of the two tables is written next

    def build(self, dims: Dims, rows: Rows) -> StepTable:
        """The table for a step with these rows. The call after the next one overwrites it.

        Raises MegakernelError if a capacity is exceeded; the error names it (a field of Dims).
        """
        last, kept = self._kept[1 - self._turn], self._kept[self._turn]
        changed = self._pages.changed[self._turn]
        if kept is None or kept.table.dims is not dims:
            kept = _Kept(StepTable(dims))
            changed[:] = True
        self._kept[self._turn] = new = _Kept(kept.table)
        table, lineup = kept.table, rows.lineup
        going_on = last and last.rows and last.table.dims is dims and _goes_on(last.rows, rows)
        if last and going_on and (rows.start % dims.kv_block).all():
            new.dealt = last.dealt
        if not new.dealt:
            new.dealt = deal_items(dims, lineup.slot, rows.start, lineup.count)
        if new.dealt is not kept.dealt:
            write_items(table, new.dealt)
        if kept.rows and kept.rows.lineup is lineup:
            move_rows(table, rows)
        else:
            fill_rows(table, rows, self._sampling)
        if len(stale := changed.nonzero()[0]):
            table.block_tables[stale] = self._pages.ids[stale]
            changed[:] = False
        new.rows, self._turn = rows, 1 - self._turn
        return table


def _goes_on(last: Rows, rows: Rows) -> bool:
    """Whether the step `rows` continues the step `last`: the sequences are the same, and each has a single token, at
    the position after its token in `last`.
    """
    return (
        rows.lineup is last.lineup
        and len(rows.tokens) == len(rows.start)
        and bool((rows.start == last.start + 1).all())
    )
