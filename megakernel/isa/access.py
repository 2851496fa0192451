"""Describes the data that instructions read and write: boxes of rows and columns of a buffer, as
arrays with one box per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .buffers import Buffer
from .dims import Dims
from .record import Column

Columns = Mapping[str, Column]  # by operand

OWN, EVERY = -1, -2  # values of Access.rank besides rank numbers


class Kind(Enum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # read, add, write back


class Index(Enum):
    """How the part of its box that an instruction touches is selected.

    NONE         The instruction touches its whole box.
    ITEM         By attention items. The items of all attention instructions of a rank and layer
                 together partition the box (rows x KV heads). An item also reads the K and V rows
                 of the row blocks for which it waits (`item_wait_block`, `item_wait_blocks`).
                 `item_columns` gives the columns that belong to KV heads.
    LOGIT_ROW    By the step table. For each logit row i of the instruction, it touches row
                 `logit_rows[i]`. The box has all rows that may be selected. If each rank owns a
                 part of the rows, the instruction touches only rows that its rank owns.
    LOGIT_OWNER  By the step table. The rank that owns token row `logit_rows[i]` writes row i of the
                 box. Every rank has an instruction with this box, and exactly one rank writes each
                 row (rank 0 writes padding rows).
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"
    LOGIT_OWNER = "logit owner"


@dataclass(frozen=True)
class Access:
    """Half-open boxes, one per instruction: rows [row, row_end) x columns [col, col_end) of `buffer`.

    Rows are token rows. This includes K_CACHE and V_CACHE, because the step table maps each token
    row to its own place in the cache. For buffers with one row per logit row they are logit rows,
    and for REDUCE they are rows of the buffer itself. Columns are elements of a row. Only buffers
    that a step writes are listed, because weights and earlier KV do not change during a launch.

    `rank` says which rank's copy is touched: OWN, EVERY, a rank, or an array with one rank per
    instruction. Copies of other ranks are only written, never read. In an ITEM access, `rank` may
    be None, which means that each row block is touched on the rank that owns it.
    """

    buffer: Buffer
    kind: Kind
    row: Column
    row_end: Column
    col: Column
    col_end: Column
    index: Index = Index.NONE
    rank: int | Column | None = OWN


def item_columns(buffer: Buffer, dims: Dims, first: int, end: int) -> tuple[int, int]:
    """The columns of `buffer` that attention items touch for the rank's KV heads [first, end)."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return first * dims.head_dim, end * dims.head_dim
    base = dims.o_first if buffer is Buffer.ATTN else 0
    if first == end:
        return base, base
    low, high = dims.query_heads(first)[0], dims.query_heads(end - 1)[1]
    return base + low * dims.head_dim, base + high * dims.head_dim
