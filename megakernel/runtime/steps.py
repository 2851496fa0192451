"""The tables of successive steps, of which only what has changed is written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..isa import Dims, StepTable
from .attention_items import Dealt, deal_items, write_items
from .rows import Rows, fill_rows, move_rows
from .sampling import Sampling


class Pages:
    """Page ids of each slot's sequence; `count` of a row of `ids` are valid.

    Whoever changes a row says so in `changed`, which has a row for each of the two tables that `Steps` writes in turn.
    """

    def __init__(self, dims: Dims) -> None:
        self.ids = np.zeros((dims.max_seqs, dims.pages_per_seq), np.int32)
        self.count = np.zeros(dims.max_seqs, np.int32)
        self.changed = np.ones((2, dims.max_seqs), np.bool_)


@dataclass
class _Kept:
    """A table and what it was last written for. `form` is the same object for tables that differ in tokens only."""

    table: StepTable
    rows: Rows | None = None
    changes: int = 0  # of `Sampling`
    form: object = None
    dealt: Dealt | None = None


class Steps:
    """Writes the tables of an engine's steps into two tables in turn: a launch reads one while the other is written.

    While the same sequences go on by one token each, a table needs new tokens and positions only, and its attention
    items stay as they are until a row enters its next KV block.
    """

    def __init__(self, pages: Pages, sampling: Sampling) -> None:
        self._pages, self._sampling = pages, sampling
        self._kept: list[_Kept | None] = [None, None]
        self._turn = 0  # which of the two is next

    def build(self, dims: Dims, rows: Rows) -> StepTable:
        """The table of a step of `rows`, which the call after the next one overwrites.

        Raises MegakernelError naming the capacity (a field of Dims) that is exceeded.
        """
        turn, changes = self._turn, self._sampling.changes
        last, kept = self._kept[1 - turn], self._kept[turn]
        if kept is None or kept.table.dims is not dims:
            kept = self._kept[turn] = _Kept(StepTable(dims))
            self._pages.changed[turn] = True
        table, filled_as, dealt_as = kept.table, kept.form, kept.dealt
        kept.form = kept.dealt = None  # so that an exception leaves a table that is written anew
        form: object = object()
        dealt = None
        if last and last.rows and last.table.dims is dims and last.changes == changes and _alike(last.rows, rows):
            form = last.form
            if _goes_on(last.rows, rows) and (rows.start % dims.kv_block).all():
                dealt = last.dealt
        if dealt is None:
            dealt = deal_items(dims, rows.slot, rows.start, rows.count)
        if dealt is not dealt_as:
            write_items(table, dealt)
        if form is filled_as:
            move_rows(table, rows)
        else:
            fill_rows(table, rows, self._sampling)
        changed = np.flatnonzero(self._pages.changed[turn])
        table.block_tables[changed] = self._pages.ids[changed]
        self._pages.changed[turn, changed] = False
        self._kept[turn], self._turn = _Kept(table, rows, changes, form, dealt), 1 - turn
        return table


def _alike(a: Rows, b: Rows) -> bool:
    """Whether they differ in tokens and positions only."""
    names = ("slot", "count", "chunk", "index", "place", "target", "store")
    pairs = ((getattr(a, name), getattr(b, name)) for name in names)
    return all(x is y or np.array_equal(x, y) for x, y in pairs)


def _goes_on(last: Rows, rows: Rows) -> bool:
    """Whether each chunk is the token after the one that its sequence had in `last`."""
    return len(rows.tokens) == len(rows.slot) and bool((rows.start == last.start + 1).all())
