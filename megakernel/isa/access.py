"""Describes which data an instruction reads and writes: boxes, which are ranges of rows and columns of a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .buffers import Buffer
from .dims import Dims
from .record import Column

Columns = Mapping[str, Column]  # by operand

OWN, EVERY = -1, -2  # special values of Access.rank: the instruction's own rank, and every rank


class Kind(Enum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # the instruction reads an element, adds to it and writes it back


class Index(Enum):
    """Which part of its box an instruction touches. A box is a range of rows and columns of a buffer. If the step table
    selects the part, the compiler does not know it.

    NONE         The whole box.
    ITEM         The rows and KV heads of the attention items that the step table gives to the instruction. The items of
                 all attention instructions of a rank and layer together cover the box once. `item_columns` gives the
                 columns of KV heads. An item also reads K and V of the row blocks (groups of consecutive token rows)
                 for which it waits (`item_wait_block`, `item_wait_blocks`).
    LOGIT_ROW    The row `logit_rows[i]` for each logit row i of the instruction; `logit_rows` is a field of the step
                 table. The box has all rows that may be selected. If each rank owns some of the rows, an instruction
                 touches only rows of its own rank.
    LOGIT_OWNER  The rows i of the box for which the instruction's rank owns token row `logit_rows[i]`. Every rank has
                 an instruction with this box, and exactly one rank writes each row (rank 0 writes padding rows).
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"
    LOGIT_OWNER = "logit owner"


@dataclass(frozen=True)
class Access:
    """One kind of access to `buffer` by n instructions. Instruction i touches rows [row[i], row_end[i]) and columns
    [col[i], col_end[i]).

    A row number counts the tokens of the step, also in K_CACHE and V_CACHE, although the step table decides where in
    the cache a token's K and V are stored. Only buffers with one row per logit row, and REDUCE, number their rows
    differently. A column is an element of a row. Weights, and the K and V of earlier steps, do not change during a
    launch and are not listed.

    `rank` says which rank's copy of the buffer is touched: OWN, EVERY, a rank, or an array with one rank per
    instruction. An instruction may write other ranks' copies, but it never reads them. In an ITEM access, `rank` may be
    None: each row is then written on the rank that owns it.

    `share` is the mean fraction of a box that is touched, for predictions of time. It differs from 1 only for experts,
    where a box has columns for every expert that a row might choose (operations/experts.py).
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
    """Return the columns [begin, end) of `buffer` that belong to KV heads [first, end), counted from the rank's first
    KV head. In Q and ATTN, these are the columns of the query heads that share these KV heads."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return first * dims.model.head_dim, end * dims.model.head_dim
    base = dims.split.o_first if buffer is Buffer.ATTN else 0
    if first == end:
        return base, base
    low, high = dims.split.query_heads(first)[0], dims.split.query_heads(end - 1)[1]
    return base + low * dims.model.head_dim, base + high * dims.model.head_dim
