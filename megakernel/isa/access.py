"""What an instruction touches: boxes of rows and columns of a buffer, for a whole column of instructions at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from .buffers import Buffer

Column = NDArray[np.int32]


class Kind(Enum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # read, add, write back


class Index(Enum):
    """Who picks the box.

    NONE       the operands: the instruction touches exactly its box.
    ITEM       attention work items: across all attention instructions of a layer, the items' (rows x KV heads)
               partition the box; an item also reads K and V rows of its row blocks [item_wait_block, +blocks).
    LOGIT_ROW  row `logit_rows[i]` for each logit row i of the instruction; the box is every row it may be.
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"


@dataclass(frozen=True)
class Access:
    """Half-open boxes, one per instruction: rows [row, row_end) x columns [col, col_end) of `buffer`.

    Rows are token rows (for K_CACHE and V_CACHE too: the row whose K or V it is; the step table maps distinct
    rows to distinct cache slots), or logit rows for buffers shaped by them. Columns are elements of a row. Only
    buffers written inside a step are listed: weights and earlier KV are constant during a launch.
    """

    buffer: Buffer
    kind: Kind
    row: Column
    row_end: Column
    col: Column
    col_end: Column
    index: Index = Index.NONE
