"""What instructions touch: boxes of rows and columns of a buffer, as arrays with one box per instruction."""

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
    """Who selects the box.

    NONE         The operands do: the instruction touches exactly its box.
    ITEM         Attention work items do. The items of all attention instructions of a rank and layer partition the box
                 (rows x KV heads). An item also reads the K and V rows of its row blocks [item_wait_block, +blocks).
                 `item_columns` gives the columns of some KV heads.
    LOGIT_ROW    `logit_rows[i]` is the row for each logit row i of the instruction; the box has every row it may be.
                 Where rows have owners, only the rows that the instruction's rank owns.
    LOGIT_OWNER  A write of rows of the box by the rank that owns token row `logit_rows[i]`. Every rank has an
                 instruction with this box, and exactly one of them writes each row (rank 0 writes padding rows).
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"
    LOGIT_OWNER = "logit owner"


@dataclass(frozen=True)
class Access:
    """Half-open boxes, one per instruction: rows [row, row_end) x columns [col, col_end) of `buffer`.

    Rows are token rows, also for K_CACHE and V_CACHE: the row whose K or V it is, which the step table maps to a
    distinct cache slot. They are logit rows for buffers shaped by these, and rows of the buffer itself for REDUCE.
    Columns are elements of a row. Only buffers that a step writes are listed, because weights and earlier KV do not
    change during a launch.

    `rank` says whose copy is touched: OWN, EVERY, a rank, or an array with one rank per instruction. Copies of other
    ranks are only written, never read. In an ITEM access, None means the owner of each row block.
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
