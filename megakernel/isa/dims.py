"""The sizes that a program is compiled for. Declared once: the C++ struct is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .dtypes import BLOCKS, Dtype

# Every shard of the FFN and of the vocabulary, except the last, has a multiple of this many columns: those of a
# quantisation group, or of two packed panels.
SHARD_UNIT = 32

# The elements of a row of K or V that share a scale in a quantised cache (Q8_0), and the bytes of that scale.
KV_UNIT = BLOCKS[Dtype.Q8_0].weights
KV_SCALE = BLOCKS[Dtype.Q8_0].bytes - KV_UNIT

# One row or count, or an array of them.
Int = TypeVar("Int", int, NDArray[np.int32], NDArray[np.int64])


class Units(IntEnum):
    """The units that compute a matmul.

    CORE    a CPU core's vector unit: any number of rows, one order of additions
    DOTS    a GPU's vector units: one dot product per output, for few rows
    TENSOR  a GPU's matrix units
    """

    CORE = 0
    DOTS = 1
    TENSOR = 2


@dataclass(frozen=True)
class Dims:
    """The sizes of a step as one rank sees them. All are counts unless a unit is given.

    The first group of fields comes from the model, the second from the numerics class and the machine, the third from
    the bucket and the engine's limits. The fourth group says how `tp` ranks share the model and which rank's view this
    is, and the last describes a worker. `rms_eps` is the only float. Properties named `rank_...` are sizes of the
    rank's shard.

    Query heads, FFN columns and vocabulary rows are divided among the ranks in contiguous shards, larger ones first,
    whose sizes differ by at most one unit (a head, or SHARD_UNIT columns). A shard may be empty. A rank has the KV
    heads that its query heads use, so two neighbouring ranks may have the same KV head. Row block b of the token rows
    belongs to rank b % tp, or to every rank if the residual is replicated (`replicated_residual`).
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float

    dtype: int  # Dtype of activations, and of the KV cache unless that is quantised; accumulation is in float32
    kv_block: int  # KV tokens that share one softmax partial (m, l, o); fixed by the numerics class
    kv_page: int  # KV tokens in a page of the cache; divides kv_block
    row_block: int  # token rows that share one row-block counter

    tokens: int  # token rows of the bucket
    logit_rows: int  # rows that get logits
    max_seqs: int  # sequences with a block table, and request slots with a history
    max_context: int  # tokens a sequence may reach
    items: int  # attention work items
    attention_slots: int  # attention instructions per layer
    partials: int  # split-attention partials, one per (split item, query row, kv block)
    bias_entries: int  # logit-bias pairs, all rows together
    mask_rows: int = 0  # logit rows that may have a mask of allowed tokens

    tp: int = 1  # ranks that share the model
    rank: int = 0  # the rank that sees these sizes; a program's own dims are rank 0's
    replicated_o: int = 0  # 1: every rank has all of W_O, and attention stores heads at the rank that owns the row
    replicated_residual: int = 0  # 1: every rank has the whole residual and adds all ranks' partials itself

    units: int = 0  # which Units compute a matmul; part of the numerics class
    ring_pages: int = 0  # pages of shared memory in a worker's ring (see isa/pages.py); 0 if the target has none
    # 1: K and V are stored in Q8_0; each token's row of a head is quantised by itself. Part of the numerics class
    quantised_kv: int = 0
    sms: int = 1  # SMs of a worker; two SMs load each weight tile once for both and divide an instruction's rows

    @property
    def row_blocks(self) -> int:
        return ceil_div(self.tokens, self.row_block)

    @property
    def pages_per_seq(self) -> int:
        return ceil_div(self.max_context, self.kv_page)

    @property
    def own_rows(self) -> int:
        """The maximum number of token rows that a rank owns. Each slot of REDUCE has this many rows."""
        return self.tokens if self.replicated_residual else ceil_div(self.row_blocks, self.tp) * self.row_block

    @property
    def own_logit_rows(self) -> int:
        """Logit rows are dealt to the ranks in runs of this length: row i is sampled by rank i // own_logit_rows."""
        return ceil_div(self.logit_rows, self.tp)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask, which has one bit per token."""
        return ceil_div(self.vocab, 32)

    @property
    def rank_heads(self) -> int:
        return share(self.heads, self.tp, self.rank)

    @property
    def first_head(self) -> int:
        return start(self.heads, self.tp, self.rank)

    @property
    def rank_kv_heads(self) -> int:
        return (
            ceil_div(self.first_head + self.rank_heads, self.group_size) - self.first_kv_head if self.rank_heads else 0
        )

    @property
    def first_kv_head(self) -> int:
        return self.first_head // self.group_size

    @property
    def rank_ffn(self) -> int:
        return min(self.ffn - self.first_ffn, SHARD_UNIT * share(shard_units(self.ffn), self.tp, self.rank))

    @property
    def first_ffn(self) -> int:
        return min(self.ffn, SHARD_UNIT * start(shard_units(self.ffn), self.tp, self.rank))

    @property
    def rank_vocab(self) -> int:
        return min(self.vocab - self.first_vocab, SHARD_UNIT * share(shard_units(self.vocab), self.tp, self.rank))

    @property
    def first_vocab(self) -> int:
        return min(self.vocab, SHARD_UNIT * start(shard_units(self.vocab), self.tp, self.rank))

    @property
    def head_ranks(self) -> int:
        """Ranks 0 .. head_ranks - 1 have query heads."""
        return min(self.heads, self.tp)

    @property
    def q_cols(self) -> int:
        return self.rank_heads * self.head_dim

    @property
    def kv_cols(self) -> int:
        return self.rank_kv_heads * self.head_dim

    @property
    def qkv_cols(self) -> int:
        return self.q_cols + 2 * self.kv_cols

    @property
    def o_cols(self) -> int:
        """The columns of ATTN, which are the inner length of the O projection."""
        return self.heads * self.head_dim if self.replicated_o else self.q_cols

    @property
    def o_first(self) -> int:
        """The column of ATTN where the rank's first query head begins."""
        return self.first_head * self.head_dim if self.replicated_o else 0

    @property
    def kv_row(self) -> int:
        """Elements of a token's row of K or V of one head as the cache stores it; bytes if the cache is quantised."""
        return self.head_dim + self.quantised_kv * KV_SCALE * ceil_div(self.head_dim, KV_UNIT)

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    def query_head(self, kv_head: int) -> int:
        """The first query head that uses KV head `kv_head`. Both numbers count from the rank's own first head."""
        return max((self.first_kv_head + kv_head) * self.group_size - self.first_head, 0)

    def query_head_end(self, kv_head: int) -> int:
        """One past the last query head that uses KV head `kv_head`, counted likewise."""
        return min((self.first_kv_head + kv_head + 1) * self.group_size - self.first_head, self.rank_heads)

    def owner(self, row: Int) -> Int:
        """The rank that keeps the residual of a token row, unless every rank does."""
        return row // self.row_block % self.tp

    def reduce_place(self, row: Int) -> Int:
        """The row, within a rank's slot of REDUCE, of the partial sum for token row `row`."""
        if self.replicated_residual:
            return row
        return row // self.row_block // self.tp * self.row_block + row % self.row_block

    def reduce_row(self, from_rank: int, row: Int) -> Int:
        """The row of REDUCE where `from_rank` stores its partial sum for token row `row`."""
        return from_rank * self.own_rows + self.reduce_place(row)

    # -- the remaining methods exist only in Python

    def query_heads(self, kv_head: int) -> tuple[int, int]:
        """The rank's query heads [first, end) that use its KV head `kv_head`."""
        return self.query_head(kv_head), self.query_head_end(kv_head)

    def owners(self, row: int) -> range:
        """The ranks that keep the residual of a token row."""
        owner = self.owner(row)
        return range(self.tp) if self.replicated_residual else range(owner, owner + 1)


def ceil_div(a: Int, b: int) -> Int:
    """a / b, rounded up; also for NumPy arrays."""
    return -(-a // b)


def shard_units(columns: int) -> int:
    return ceil_div(columns, SHARD_UNIT)


def share(units: int, ranks: int, rank: int) -> int:
    return units // ranks + (rank < units % ranks)


def start(units: int, ranks: int, rank: int) -> int:
    return rank * (units // ranks) + min(rank, units % ranks)


DIM_FIELDS: tuple[tuple[str, type], ...] = tuple((f.name, float if f.name == "rms_eps" else int) for f in fields(Dims))

# KV tokens per partial softmax result. Every program uses the same number, because attention's bits depend on it.
KV_BLOCK = 128
