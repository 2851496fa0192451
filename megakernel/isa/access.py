"""What an instruction touches: boxes of rows and columns of a buffer, for a whole column of instructions at once."""

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
    """Who picks the box.

    NONE         the operands: the instruction touches exactly its box.
    ITEM         attention work items: across all attention instructions of a rank and layer, the items' (rows x KV
                 heads) partition the box; an item also reads K and V rows of its row blocks
                 [item_wait_block, +blocks). `item_columns` gives the columns of some KV heads.
    LOGIT_ROW    row `logit_rows[i]` for each logit row i of the instruction; the box is every row it may be. Where
                 rows have owners, only those that the instruction's rank owns.
    LOGIT_OWNER  a write of rows of the box by the rank that owns token row `logit_rows[i]`: every rank has an
                 instruction with this box, and each row is written by exactly one of them (padding rows by rank 0).
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"
    LOGIT_OWNER = "logit owner"


@dataclass(frozen=True)
class Access:
    """Half-open boxes, one per instruction: rows [row, row_end) x columns [col, col_end) of `buffer`.

    Rows are token rows (for K_CACHE and V_CACHE too: the row whose K or V it is; the step table maps distinct
    rows to distinct cache slots), logit rows for buffers shaped by them, and rows of the buffer for REDUCE. Columns
    are elements of a row. Only buffers written inside a step are listed: weights and earlier KV are constant during
    a launch.

    `rank` says whose copy is touched: OWN, EVERY, a rank, or a column of ranks, one per instruction. Other ranks'
    copies are only ever written. An ITEM access has None where each row block's owner is meant.
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
    """Columns of `buffer` that attention items of the rank's KV heads [first, end) touch."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return first * dims.head_dim, end * dims.head_dim
    base = dims.o_first if buffer is Buffer.ATTN else 0
    if first == end:
        return base, base
    low, high = dims.query_heads(first)[0], dims.query_heads(end - 1)[1]
    return base + low * dims.head_dim, base + high * dims.head_dim
