"""The sizes for which a program is compiled, in four records, from which one flat C++ struct is generated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .dtypes import BLOCKS, Dtype

# Every shard of the FFN and of the vocabulary, except the last, has a multiple of this many
# columns. It is the size of a quantisation group, and the width of two column panels of a packed CPU matrix.
SHARD_UNIT = 32

# In a quantised cache (Q8_0), KV_UNIT elements of a row of K or V share a scale, which has KV_SCALE bytes.
KV_UNIT = BLOCKS[Dtype.Q8_0].weights
KV_SCALE = BLOCKS[Dtype.Q8_0].bytes - KV_UNIT

# KV tokens per partial softmax result. Every program uses the same number, because attention's bits depend on it.
KV_BLOCK = 128

# The maximum number of experts of a layer: as many columns as a CPU computes of a row in one pass of a matmul, so that
# the logits of all experts are there when it chooses the best.
MOST_EXPERTS = 512
# The span of a layer without a sliding window: more tokens than any context has.
ALL_TOKENS = 1 << 30

# A row number or a count, or an array of such numbers.
Int = TypeVar("Int", int, NDArray[np.int32], NDArray[np.int64])


class Units(IntEnum):
    """The units that compute a matmul.

    CORE    a CPU core's vector unit; the order of additions is the same for any number of rows
    DOTS    a GPU's CUDA cores: one dot product per output, for few rows
    TENSOR  a GPU's tensor cores
    """

    CORE = 0
    DOTS = 1
    TENSOR = 2


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model and of its numbers. All are counts, except `rms_eps`, `dtype`, `quantised_kv`,
    `q8_activations`, `embed_scale`, `normalised_routes`, and the numbers of layers `window_from` and `full_at`.

    A layer has a sliding window unless `window` is 0, or the layer comes before layer `window_from`, or its number
    modulo `full_every` is `full_at`. A row of a layer with a window attends to `window` tokens, its own included.
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    dtype: int  # Dtype of activations, and of K and V unless quantised_kv; sums are in float32
    quantised_kv: int = 0  # 1: K and V are stored in Q8_0, each token's row of a head by itself; determines result bits
    q8_activations: int = 0  # 1: inputs of quantised weights are rounded to 8 bits; determines result bits
    embed_scale: float = 1.0  # multiplies embeddings
    experts: int = 0  # MLPs of a layer, of which a token uses some; 0: one MLP, which all tokens use
    experts_per_token: int = 0
    normalised_routes: int = 0  # 1: the weights of a token's experts are divided by their sum
    clipped_gates: int = 0  # 1: experts have the gate of gpt-oss (operations/experts.py)
    window: int = 0
    window_from: int = 0
    full_every: int = 1
    full_at: int = 1
    post_norms: int = 0  # 1: what a layer adds to the residual is normalised first
    whole_norms: int = 0  # 1: RMS norms span all heads of q and of k, so that each rank computes all of q, k and v

    @property
    def stack(self) -> tuple[int, ...]:
        """The axis that the weights of a layer's experts have in front of the axes of one expert's."""
        return (self.experts,) if self.experts else ()

    def span(self, layer: int) -> int:
        """Return the maximum number of tokens to which a row of a layer attends, its own included."""
        if self.window < 1:
            return ALL_TOKENS
        if layer < self.window_from:
            return ALL_TOKENS
        return ALL_TOKENS if layer % self.full_every == self.full_at else self.window

    @property
    def mask_words(self) -> int:
        """Return the number of 32-bit words of a mask, which has one bit per token of the vocabulary."""
        return ceil_div(self.vocab, 32)

    @property
    def kv_row(self) -> int:
        """The length of a head's row in the KV cache, in elements, or in bytes if the cache is quantised."""
        return self.head_dim + self.quantised_kv * KV_SCALE * ceil_div(self.head_dim, KV_UNIT)

    @property
    def group_size(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    # -- The method below has no counterpart in C++.

    @cached_property
    def spans(self) -> dict[int, int]:
        """The number of layers of each span."""
        return Counter(map(self.span, range(self.layers)))


@dataclass(frozen=True)
class Split:
    """How `tp` ranks share a model, and which part rank `rank` has. Properties named `rank_...` are sizes of its part.

    Query heads, FFN columns and vocabulary rows are divided among the ranks in contiguous shards. The sizes of
    the shards differ by at most one unit (a head, or SHARD_UNIT columns), and larger shards come first. A shard may be
    empty. A rank has the KV heads that its query heads use, so two neighbouring ranks may have the same KV head.
    """

    model: ModelSizes
    tp: int = 1
    rank: int = 0
    replicated_o: int = 0  # 1: every rank has all of W_O; attention stores a row's heads at the row's owner
    replicated_residual: int = 0  # 1: every rank has the whole residual and adds all partial sums

    @property
    def rank_heads(self) -> int:
        return start(self.model.heads, self.tp, self.rank + 1) - self.first_head

    @property
    def first_head(self) -> int:
        return start(self.model.heads, self.tp, self.rank)

    @property
    def first_kv_head(self) -> int:
        return self.first_head // self.model.group_size

    @property
    def rank_kv_heads(self) -> int:
        if self.rank_heads < 1:
            return 0
        return ceil_div(self.first_head + self.rank_heads, self.model.group_size) - self.first_kv_head

    @property
    def first_ffn(self) -> int:
        return shard(self.model.ffn, self.tp, self.rank)

    @property
    def rank_ffn(self) -> int:
        return shard(self.model.ffn, self.tp, self.rank + 1) - self.first_ffn

    @property
    def first_vocab(self) -> int:
        return shard(self.model.vocab, self.tp, self.rank)

    @property
    def rank_vocab(self) -> int:
        return shard(self.model.vocab, self.tp, self.rank + 1) - self.first_vocab

    @property
    def head_ranks(self) -> int:
        """Return the number of ranks that have query heads. These are ranks 0 to head_ranks - 1."""
        return min(self.model.heads, self.tp)

    @property
    def q_cols(self) -> int:
        return self.rank_heads * self.model.head_dim

    @property
    def kv_cols(self) -> int:
        return self.rank_kv_heads * self.model.head_dim

    @property
    def qkv_cols(self) -> int:
        return self.q_cols + 2 * self.kv_cols

    @property
    def o_cols(self) -> int:
        """Return the number of columns of ATTN, which is the inner length of the O projection."""
        return self.model.heads * self.model.head_dim if self.replicated_o else self.q_cols

    @property
    def o_first(self) -> int:
        """Return the column of ATTN where the rank's first query head begins."""
        return self.first_head * self.model.head_dim if self.replicated_o else 0

    def query_head(self, kv_head: int) -> int:
        """Return the first query head that uses KV head `kv_head`. Both are numbered from the rank's first head."""
        return max((self.first_kv_head + kv_head) * self.model.group_size - self.first_head, 0)

    def query_head_end(self, kv_head: int) -> int:
        """Return one past the last query head that uses KV head `kv_head`."""
        return min((self.first_kv_head + kv_head + 1) * self.model.group_size - self.first_head, self.rank_heads)

    # -- The methods below have no counterpart in C++.

    @property
    def qkv_rows(self) -> int:
        """The rows of W_QKV that the rank has: all, even those of other ranks' heads, if norms span all heads."""
        return Split(self.model).qkv_cols if self.model.whole_norms and self.rank_heads else self.qkv_cols

    def query_heads(self, kv_head: int) -> tuple[int, int]:
        """Return the rank's query heads [first, end) that use its KV head `kv_head`."""
        return self.query_head(kv_head), self.query_head_end(kv_head)

    def on(self, rank: int) -> Split:
        """Return the split as rank `rank` sees it."""
        return self if rank == self.rank else replace(self, rank=rank)

    @property
    def ranks(self) -> list[Split]:
        """The split as each rank sees it."""
        return [self.on(rank) for rank in range(self.tp)]


@dataclass(frozen=True)
class Bucket:
    """The maximum sizes of a step of a program, and the engine's limits. All are counts."""

    kv_block: int  # KV tokens per partial softmax result (m, l, o); the same in all programs
    kv_page: int  # KV tokens in a page of the cache; divides kv_block
    row_block: int  # token rows of a row block; the rows of a block share counters
    tokens: int  # token rows of the bucket
    logit_rows: int  # token rows that get logits
    max_seqs: int  # maximum number of sequences in a step, each with a block table; HISTORY has as many slots
    max_context: int  # the maximum number of tokens in a sequence
    items: int  # maximum number of attention items (isa/step.py)
    attention_slots: int  # attention instructions per layer
    partials: int  # rows of PARTIALS, one per (split, query row, KV head, KV block)
    bias_entries: int  # maximum number of (token, bias) pairs of all rows together
    mask_rows: int = 0  # logit rows that may have a mask of allowed tokens

    @property
    def row_blocks(self) -> int:
        return ceil_div(self.tokens, self.row_block)

    @property
    def pages_per_seq(self) -> int:
        return ceil_div(self.max_context, self.kv_page)


@dataclass(frozen=True)
class Worker:
    """What computes an instruction: a CPU core, an SM or a pair of SMs."""

    units: int = 0  # the Units that compute matmuls; they determine the bits of the results
    ring_pages: int = 0  # shared-memory pages of an SM; 0 if the target has none
    sms: int = 1  # SMs of a worker; two SMs share weight tiles and divide an instruction's rows


@dataclass(frozen=True)
class Dims:
    """The sizes of a program's steps as one rank sees them. `Program.dims` has those of rank 0.

    Row block b of the token rows belongs to rank b % tp, or to every rank if the residual is replicated.
    """

    split: Split
    bucket: Bucket
    worker: Worker

    @property
    def model(self) -> ModelSizes:
        return self.split.model

    @property
    def own_rows(self) -> int:
        """The maximum number of token rows that a rank owns. In REDUCE, each rank has a slot of this many rows."""
        if self.split.replicated_residual:
            return self.bucket.tokens
        return ceil_div(self.bucket.row_blocks, self.split.tp) * self.bucket.row_block

    @property
    def by_expert(self) -> int:
        """Return 1 if an instruction of EXPERTS has all rows of one expert, so that they share its weights. If a step
        has at most as many pairs (row, expert of the row) as there are experts, it has one pair instead: 0."""
        return 1 if self.bucket.tokens * self.model.experts_per_token > self.model.experts else 0

    @property
    def places(self) -> int:
        """Return the number of places where a row may have results of experts: experts, or the row's own experts."""
        return self.model.experts if self.by_expert else self.model.experts_per_token

    @property
    def own_logit_rows(self) -> int:
        """The number of consecutive logit rows that each rank samples. Rank i // own_logit_rows samples row i."""
        return ceil_div(self.bucket.logit_rows, self.split.tp)

    def owner(self, row: Int) -> Int:
        """Return the rank that keeps the residual of a token row, if the residual is not replicated."""
        return row // self.bucket.row_block % self.split.tp

    def reduce_place(self, row: Int) -> Int:
        """The row of a partial sum for token row `row`, counted from the beginning of a rank's slot in REDUCE."""
        if self.split.replicated_residual:
            return row
        return row // self.bucket.row_block // self.split.tp * self.bucket.row_block + row % self.bucket.row_block

    def reduce_row(self, from_rank: int, row: Int) -> Int:
        """Return the row of REDUCE where `from_rank` stores its partial sum for token row `row`."""
        return from_rank * self.own_rows + self.reduce_place(row)

    # -- The methods below have no counterpart in C++.

    def owners(self, row: int) -> range:
        """Return the ranks that keep the residual of a token row."""
        owner = self.owner(row)
        return range(self.split.tp) if self.split.replicated_residual else range(owner, owner + 1)

    def on(self, rank: int) -> Dims:
        """Return the sizes as rank `rank` sees them."""
        return self if rank == self.split.rank else replace(self, split=self.split.on(rank))

    @property
    def ranks(self) -> list[Dims]:
        """The sizes as each rank sees them."""
        return [self.on(rank) for rank in range(self.split.tp)]

    @cached_property
    def flat(self) -> dict[str, float]:
        """All sizes by name, in the order of DIM_FIELDS. It is kept, because each launch compares its sizes."""
        sizes = vars(self.model) | vars(self.split) | vars(self.bucket) | vars(self.worker)
        return {name: sizes[name] for name, _ in DIM_FIELDS}

    @staticmethod
    def of(**sizes: float) -> Dims:
        """Return the Dims with these sizes, named as in DIM_FIELDS. Raises TypeError if one is missing."""
        of = {record: {n: sizes.pop(n) for n in names if n in sizes} for record, names in _RECORDS.items()}
        if sizes:
            raise TypeError(f"there are no sizes {', '.join(sizes)}")
        model = ModelSizes(**of[ModelSizes])  # type: ignore[arg-type]
        split = Split(model, **of[Split])  # type: ignore[arg-type]
        return Dims(split, Bucket(**of[Bucket]), Worker(**of[Worker]))  # type: ignore[arg-type]

    def changed(self, **sizes: float) -> Dims:
        """Return these sizes with other values for the sizes that `sizes` names as in DIM_FIELDS."""
        return Dims.of(**self.flat | sizes)


def ceil_div(a: Int, b: int) -> Int:
    """Return a / b, rounded up. Also works for NumPy arrays."""
    return -(-a // b)


def start(units: int, ranks: int, rank: int) -> int:
    """Return the first unit of a rank's share; for `rank` = `ranks`, the number of units."""
    return rank * (units // ranks) + min(rank, units % ranks)


def shard(columns: int, ranks: int, rank: int) -> int:
    """Return the first column of a rank's shard; for `rank` = `ranks`, the number of columns."""
    return min(columns, SHARD_UNIT * start(ceil_div(columns, SHARD_UNIT), ranks, rank))


_RECORDS = {
    record: tuple(f.name for f in fields(record) if f.name != "model") for record in (ModelSizes, Split, Bucket, Worker)
}
# The fields of all records: those of the C++ struct, in order.
DIM_FIELDS: tuple[tuple[str, type], ...] = tuple(
    (name, float if name in ("rms_eps", "embed_scale") else int) for names in _RECORDS.values() for name in names
)
