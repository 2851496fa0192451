"""The data that instructions read and write: boxes (ranges of rows and columns of a buffer), one per instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .buffers import Buffer
from .dims import Dims
from .record import Column

Columns = Mapping[str, Column]  # by operand

OWN, EVERY = -1, -2  # values that Access.rank may have besides rank numbers


class Kind(Enum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # the instruction reads an element, adds to it and writes it back


class Index(Enum):
    """Which part of its box an instruction touches.

    NONE         The instruction touches its whole box.
    ITEM         The attention items of the instruction select the part: each item has some rows and KV heads of the
                 box. The items of all attention instructions of a rank and layer together cover the box once.
                 `item_columns` gives the columns of KV heads. An item also reads K and V of the row blocks for which
                 it waits (`item_wait_block`, `item_wait_blocks`).
    LOGIT_ROW    The step table selects the part. For each logit row i, the instruction touches row `logit_rows[i]`.
                 The box has all rows that may be selected. If each rank owns a part of the rows, the instruction
                 touches only rows that its rank owns.
    LOGIT_OWNER  The step table selects the part. The rank that owns token row `logit_rows[i]` writes row i of the box.
                 Every rank has an instruction with this box, and exactly one rank writes each row (rank 0 writes
                 padding rows).
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"
    LOGIT_OWNER = "logit owner"


@dataclass(frozen=True)
class Access:
    """Half-open boxes, one per instruction: rows [row, row_end) x columns [col, col_end) of `buffer`.

    Rows are token rows, also in K_CACHE and V_CACHE, where the step table maps each token row to its own
    place. Two kinds of buffers differ: those with one row per logit row have logit rows, and REDUCE has
    rows of its own. Columns are elements of a row. Only buffers that a step writes are listed, because
    weights and earlier KV do not change during a launch.

    `rank` says which rank's copy is touched: OWN, EVERY, a rank, or an array with one rank per
    instruction. Copies of other ranks are only written, never read. In an ITEM access, `rank` may
    be None, which means that each row block is touched on the rank that owns it.

    `share` is the part of the boxes that the instructions touch on average, for predictions of time. Only experts have
    another share than 1 (operations/experts.py). The columns of their results are counted in places.
    """

    buffer: Buffer
    kind: Kind
    row: Column
    row_end: Column
    col: Column
    col_end: Column
    index: Index = Index.NONE
    rank: int | Column | None = OWN
    share: float = 1.0


def item_columns(buffer: Buffer, dims: Dims, first: int, end: int) -> tuple[int, int]:
    """Return the columns [begin, end) of `buffer` that attention items touch for the rank's KV heads [first, end)."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return first * dims.model.head_dim, end * dims.model.head_dim
    base = dims.split.o_first if buffer is Buffer.ATTN else 0
    if first == end:
        return base, base
    low, high = dims.split.query_heads(first)[0], dims.split.query_heads(end - 1)[1]
    return base + low * dims.model.head_dim, base + high * dims.model.head_dim
