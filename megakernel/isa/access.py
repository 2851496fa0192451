"""Describes which data an instruction reads and writes: boxes, which are ranges of rows and columns of a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .buffers import BUFFERS, Buffer
from .dims import Dims
from .record import Column

Columns = Mapping[str, Column]  # for each operand's name, its values: one per instruction
Sizes = TypeVar("Sizes", NDArray[np.int64], NDArray[np.float64])

OWN, EVERY = -1, -2  # special values of Access.rank: the instruction's own rank, and every rank


class Kind(Enum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # the instruction reads an element, adds to it and writes it back


class Index(Enum):
    """Tells which part of a box (a range of rows and columns of a buffer) an instruction touches. For all members
    except NONE, the step table (the input of a launch) selects the part. The compiler then knows only the box.

    NONE         The whole box.
    ITEM         The rows and KV heads of the instruction's attention items (pieces of attention work). The step table
                 gives items to instructions so that a layer's items cover the rank's box once. `item_columns` converts
                 KV heads to columns. Only K and V of this step's rows count, because K and V of earlier steps do not
                 change during a launch. An item reads K and V of the tokens that its rows attend to. It waits for all
                 rows in the row blocks (groups of rows) of these tokens, because each counter stands for a whole block.
    LOGIT_ROW    Only rows whose logits are computed: row `logit_rows[i]` for each logit row i of the instruction. The
                 step table contains `logit_rows`. If the rows are divided among ranks, an instruction touches only the
                 rows of its own rank.
    LOGIT_OWNER  Row i of the box if the instruction's rank owns token row `logit_rows[i]`. Every rank has an
                 instruction with this box, and exactly one rank writes each row. Rank 0 writes the rows that no
                 request uses.
    """

    NONE = "none"
    ITEM = "item"
    LOGIT_ROW = "logit row"
    LOGIT_OWNER = "logit owner"


@dataclass(frozen=True)
class Access:
    """Says which part of `buffer` each of n instructions reads or writes. The verifier finds races from these
    declarations. Instruction i touches rows [row[i], row_end[i]) and columns [col[i], col_end[i]).

    Row r is token row r of the step. This also holds for K_CACHE and V_CACHE, wherever in the cache the token's K and V
    are stored. The exceptions are buffers with one row per logit row, and REDUCE (partial sums). A column is an element
    of a row. Data that does not change during a launch is not listed: weights, and the K and V of earlier steps.

    `rank` says which rank's copy of the buffer is touched: OWN, EVERY, a rank, or an array with one rank per
    instruction. None, for ITEM only, means that each row is written on its owner, the rank that keeps its residual.
    Other ranks' copies are only written, never read.

    `share` is used only to predict times. It is the mean fraction of the box that is touched. It is below 1 only for
    experts, because their boxes have columns for every expert that a row might choose.
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

    def copies(self, dims: Dims) -> tuple[int, ...]:
        """Return the ranks whose copies of the buffer are touched. `rank` must be a number, OWN or EVERY."""
        assert isinstance(self.rank, int)
        one = dims.split.rank if self.rank == OWN else self.rank
        return tuple(range(dims.split.tp)) if self.rank == EVERY else (one,)

    def size(self, rows: Column, dims: Dims) -> NDArray[np.float64]:
        """Return how many bytes of a copy of the buffer each of n instructions touches. `rows` has the number of rows
        of each instruction, which counts if the step table selects the rows."""
        high = rows if self.index is Index.LOGIT_ROW else np.maximum(self.row_end - self.row, 0)
        wide: NDArray[np.float64] = np.maximum(self.col_end - self.col, 0).astype(np.float64)
        wide *= BUFFERS[self.buffer].resolve_dtype(dims.model).itemsize
        return wide * high * self.share


def by_rank(rank: int | Column | None, size: Sizes, own: NDArray[np.int64] | int, ranks: int) -> Sizes:
    """Return the bytes that n accesses of `size` [n] bytes touch in each rank's copy of the buffer: [n, ranks]. `rank`
    is the field of `Access`, but not None. `own` is the rank of the instructions."""
    to = rank if isinstance(rank, np.ndarray) else np.array(own if rank == OWN else rank)
    found: Sizes = np.where((to[..., None] == np.arange(ranks)) | (to[..., None] == EVERY), size[:, None], 0)
    return found


def item_columns(buffer: Buffer, dims: Dims, first: int, end: int) -> tuple[int, int]:
    """Convert the KV heads [first, end) of a rank to columns [begin, end) of `buffer`. KV heads are counted from the
    rank's first one. Q and ATTN have columns of query heads; the result is the columns of the query heads that share
    these KV heads."""
    if buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        return first * dims.model.head_dim, end * dims.model.head_dim
    base = dims.split.o_first if buffer is Buffer.ATTN else 0
    if first == end:
        return base, base
    low, high = dims.split.query_heads(first)[0], dims.split.query_heads(end - 1)[1]
    return base + low * dims.model.head_dim, base + high * dims.model.head_dim
