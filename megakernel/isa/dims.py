"""The sizes for which a program is compiled, in four dataclasses. One flat C++ struct is generated from them."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import KW_ONLY, dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .dtypes import BLOCKS, Dtype

# FFN and vocabulary columns are divided among ranks in multiples of SHARD_UNIT, so that no shard ends inside a
# quantised block of 32 weights. Only the last nonempty shard may have a width that is not a multiple. If blocks have
# 256 weights, a shard that ends inside one is an error. A CPU packs 16 columns together, which divides SHARD_UNIT.
SHARD_UNIT = 32

# In a quantised KV cache (Q8_0), KV_UNIT elements of K or V share a scale, which takes KV_SCALE bytes.
KV_UNIT = BLOCKS[Dtype.Q8_0].weights
KV_SCALE = BLOCKS[Dtype.Q8_0].bytes - KV_UNIT

# The number of tokens in a KV block. Attention computes a partial softmax for each KV block, and merges the partial
# results. All programs use the same number, because another number would change the rounding of results.
KV_BLOCK = 128

# The maximum number of experts of a layer. To choose the best, the router needs a row's logits of all experts at once.
# A CPU computes at most this many logits of a row in one pass.
MOST_EXPERTS = 512
# The value of `ModelSizes.span` for a layer without a sliding window: more tokens than any context has.
ALL_TOKENS = 1 << 30

# A row number or a count, or an array of such numbers.
Int = TypeVar("Int", int, NDArray[np.int32], NDArray[np.int64])
T = TypeVar("T")


def _hashed_once(cls: type[T]) -> type[T]:
    """Let objects of a frozen dataclass of numbers compute their hash only once, because caches often look them up."""
    compute = cls.__hash__

    def hashed(self: T) -> int:
        known: dict[str, int] = vars(self)
        if "_hash" not in known:
            known["_hash"] = compute(self)
        return known["_hash"]

    setattr(cls, "__hash__", hashed)  # noqa: B010
    return cls


class Units(IntEnum):
    """The kind of processor unit that computes matmuls. The kind determines in which order products are added, and
    therefore the last bits of results.

    CORE    a CPU core's vector unit; the order of additions is the same for any number of rows
    DOTS    a GPU's CUDA cores: one dot product per output, for few rows
    TENSOR  a GPU's tensor cores
    """

    CORE = 0
    DOTS = 1
    TENSOR = 2


@dataclass(frozen=True)
class Shape:
    """The sizes that every model has, and those that only some models have. Most are counts."""

    vocab: int
    hidden: int
    ffn: int  # width of the hidden layer of the MLP or, with experts, of each expert
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    _: KW_ONLY
    experts: int = 0  # number of experts (MLPs) of a layer, of which a token uses some; 0: one MLP for all tokens
    experts_per_token: int = 0
    normalised_routes: int = 0  # 1: the routing weights of a token's experts are divided by their sum
    sigmoid_routes: int = 0  # 1: the score of an expert is the sigmoid of its logit; 0: the softmax of all logits
    choice_bias: int = 0  # 1: B_ROUTER is added to the scores by which experts are chosen; 0: to the logits
    route_scale: float = 1.0  # multiplies the routing weights of the chosen experts
    shared_experts: int = 0  # how many experts, the last ones, every token uses besides those that the router chooses
    shared_gate: int = 0  # 1: shared experts' weight is the sigmoid of one more logit of the router; 0: it is 1
    dense_layers: int = 0  # in how many layers, the first ones, every token uses the first experts, with weight 1
    clipped_gates: int = 0  # 1: experts have the clipped gate (operations/experts.py)
    window: int = 0  # if not 0, a token attends to this many tokens, itself included, in some layers
    post_norms: int = 0  # 1: outputs of attention and the MLP are normalised before they are added to X
    whole_norms: int = 0  # 1: RMS norms span all heads of q and of k, so each rank computes all of q, k and v
    late_scales: int = 0  # 1: q and k are multiplied by the scales of their norms after RoPE, not before it
    score_cap: float = 0.0  # if not 0, attention scores s become cap * tanh(s / cap)
    logit_cap: float = 0.0  # if not 0, logits z become cap * tanh(z / cap)


@_hashed_once
@dataclass(frozen=True)
class ModelSizes(Shape):
    """The sizes of a model, and the types of its numbers. Most fields are counts.

    Four fields say which layers have a sliding window, in which a token attends only to the last `window` tokens,
    itself included. These are the layers with number >= `window_from` and number % `full_every` != `full_at`. If
    `window` is 0, no layer has one.
    """

    rms_eps: float
    dtype: int  # Dtype of activations, and of K and V unless they are quantised; sums are float32
    quantised_kv: int = 0  # 1: K and V are stored as Q8_0, quantised per token and head; this changes results
    q8_activations: int = 0  # 1: inputs of quantised weights are rounded to integers, which changes the result's bits
    embed_scale: float = 1.0  # multiplies embeddings
    window_from: int = 0
    full_every: int = 1
    full_at: int = 1

    def span(self, layer: int) -> int:
        """Return the maximum number of tokens to which a token attends in a layer, itself included."""
        if self.window < 1:
            return ALL_TOKENS
        if layer < self.window_from:
            return ALL_TOKENS
        return ALL_TOKENS if layer % self.full_every == self.full_at else self.window

    @property
    def routed_experts(self) -> int:
        """The number of experts among which the router chooses."""
        return self.experts - self.shared_experts

    @property
    def router_rows(self) -> int:
        """The number of rows of the router's matrix: one for each logit."""
        return self.routed_experts + self.shared_gate

    @property
    def mask_words(self) -> int:
        """The number of 32-bit words of a mask of allowed tokens, which has one bit per token of the vocabulary."""
        return ceil_div(self.vocab, 32)

    @property
    def kv_row(self) -> int:
        """The length of K or V of one token and KV head in the cache: in bytes if quantised, otherwise in elements."""
        return self.head_dim + self.quantised_kv * KV_SCALE * ceil_div(self.head_dim, KV_UNIT)

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    # -- The method below is used in Python only, and is not translated to C++.

    @cached_property
    def spans(self) -> dict[int, int]:
        """For each value of `span` (maximum number of attended tokens), the number of layers that have this value."""
        return Counter(map(self.span, range(self.layers)))


@_hashed_once
@dataclass(frozen=True)
class Split:
    """How `tp` ranks divide a model, as rank `rank` sees it. Properties named `rank_...` are sizes of this rank's part.

    Query heads, FFN columns and vocabulary rows are divided into one contiguous shard per rank. All shards have the
    same size, or the first ones are larger by one head, or by SHARD_UNIT columns. A shard may be empty. A rank has all
    KV heads that its query heads use. Therefore two neighbouring ranks may both have the same KV head. If experts are
    divided among ranks (expert parallelism), a rank has all FFN columns of its experts.
    """

    model: ModelSizes
    tp: int = 1
    rank: int = 0
    # 1: Every rank has all of W_O. Attention sends a row's heads to the rank that keeps the row's residual.
    replicated_o: int = 0
    replicated_residual: int = 0  # 1: every rank keeps the whole residual, and adds the partial sums of all ranks
    expert_parallel: int = 0  # 1: every rank has some whole experts; 0: it has a part of every expert

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
        return 0 if self.expert_parallel else shard(self.model.ffn, self.tp, self.rank)

    @property
    def rank_ffn(self) -> int:
        if self.expert_parallel:
            return self.model.ffn
        return shard(self.model.ffn, self.tp, self.rank + 1) - self.first_ffn

    @property
    def first_expert(self) -> int:
        return start(self.model.experts, self.tp, self.rank) if self.expert_parallel else 0

    @property
    def rank_experts(self) -> int:
        return self.model.experts // self.tp if self.expert_parallel else self.model.experts

    @property
    def first_vocab(self) -> int:
        return shard(self.model.vocab, self.tp, self.rank)

    @property
    def rank_vocab(self) -> int:
        return shard(self.model.vocab, self.tp, self.rank + 1) - self.first_vocab

    @property
    def head_ranks(self) -> int:
        """The number n of ranks that have query heads, which are ranks 0 to n - 1."""
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
        """The number of columns of ATTN (attention's output) that this rank multiplies by W_O."""
        return self.model.heads * self.model.head_dim if self.replicated_o else self.q_cols

    @property
    def o_first(self) -> int:
        """The column of ATTN, attention's output, at which the rank's first query head begins."""
        return self.first_head * self.model.head_dim if self.replicated_o else 0

    def query_head(self, kv_head: int) -> int:
        """Return the first query head that uses KV head `kv_head`. Both numbers count from the rank's first head."""
        return max((self.first_kv_head + kv_head) * self.model.group_size - self.first_head, 0)

    def query_head_end(self, kv_head: int) -> int:
        """Return 1 + the last query head that uses KV head `kv_head`. Both numbers count from the rank's first head."""
        return min((self.first_kv_head + kv_head + 1) * self.model.group_size - self.first_head, self.rank_heads)

    # -- The methods below are used in Python only, and are not translated to C++.

    @property
    def qkv_rows(self) -> int:
        """The number of rows of W_QKV on this rank. If norms span all heads, other ranks' heads are included."""
        return Split(self.model).qkv_cols if self.model.whole_norms and self.rank_heads else self.qkv_cols

    @property
    def equal_experts(self) -> bool:
        """Whether every rank can have the same number of whole experts. Expert parallelism requires this."""
        return 0 < self.model.experts == self.tp * (self.model.experts // self.tp)

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes that come before one expert's axes in a layer's weights: (rank_experts,), or () without experts."""
        return (self.rank_experts,) if self.model.experts else ()

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of heads, columns and experts of the rank. On ranks with equal numbers, instructions with equal
        operands do the same work, on other data."""
        return self.rank_heads, self.rank_kv_heads, self.rank_ffn, self.rank_experts, self.rank_vocab

    def query_heads(self, kv_head: int) -> tuple[int, int]:
        """Return the rank's query heads [first, end) that use its KV head `kv_head`."""
        return self.query_head(kv_head), self.query_head_end(kv_head)

    @cached_property
    def ranks(self) -> list[Split]:
        """The split as each rank sees it."""
        return [self if rank == self.rank else replace(self, rank=rank) for rank in range(self.tp)]


@_hashed_once
@dataclass(frozen=True)
class Bucket:
    """The maximum sizes of a step for which a program is compiled, and the engine's limits. All are counts."""

    kv_block: int  # KV tokens per partial softmax (maximum, sum, output); the same in all programs
    kv_page: int  # KV tokens in a page of the cache; divides kv_block
    row_block: int  # token rows of a row block, a group of rows whose instructions share counters
    tokens: int  # maximum number of token rows of a step
    logit_rows: int  # maximum number of token rows for which logits are computed
    max_seqs: int  # maximum number of sequences in a step, which is also the number of slots of HISTORY
    max_context: int  # the maximum number of tokens in a sequence
    items: int  # maximum number of attention items (units of attention work) of a step
    attention_slots: int  # attention instructions per layer
    partials: int  # maximum number of partial attention results, one per (query row, KV head, KV block)
    bias_entries: int  # maximum number of (token, bias) pairs of a step's logit biases
    mask_rows: int = 0  # maximum number of logit rows with a mask of allowed tokens

    @property
    def row_blocks(self) -> int:
        return ceil_div(self.tokens, self.row_block)

    @property
    def pages_per_seq(self) -> int:
        return ceil_div(self.max_context, self.kv_page)


@dataclass(frozen=True)
class Worker:
    """What executes a stream of instructions: a CPU core or an SM."""

    units: int = 0  # which units compute matmuls (see Units); the bits of the results depend on it
    ring_pages: int = 0  # shared-memory pages of an SM's ring buffer; 0 for a CPU


@_hashed_once
@dataclass(frozen=True)
class Dims:
    """All sizes of a program, as one rank sees them. `Program.dims` has those of rank 0.

    Token rows are divided into row blocks (groups of consecutive rows). Row block b has one owner, rank b % tp, which
    keeps the residual of its rows. With a replicated residual, every rank keeps the residual of all rows.
    """

    split: Split
    bucket: Bucket
    worker: Worker

    @property
    def model(self) -> ModelSizes:
        return self.split.model

    @property
    def own_rows(self) -> int:
        """The maximum number of token rows whose residual a rank keeps. REDUCE has this many rows per rank."""
        if self.split.replicated_residual:
            return self.bucket.tokens
        return ceil_div(self.bucket.row_blocks, self.split.tp) * self.bucket.row_block

    @property
    def by_expert(self) -> int:
        """How the matmuls of a mixture-of-experts layer are divided into instructions. 1: an instruction computes all
        rows that have chosen one expert, so that the expert's weights are read once. 0: an instruction computes one row
        with one of the row's experts. 0 is used if a step has at most as many (row, expert) pairs as a layer has
        experts, because then few experts' weights are read twice."""
        return 1 if self.bucket.tokens * self.model.experts_per_token > self.model.experts else 0

    @property
    def places(self) -> int:
        """The number of EXPERTS instructions (mixture-of-experts matmuls) per row and column tile. It is the number of
        the rank's experts if `by_expert` is 1, and otherwise the number of experts that a token uses."""
        return self.split.rank_experts if self.by_expert else self.model.experts_per_token

    @property
    def own_logit_rows(self) -> int:
        """The number of logit rows that each rank samples. Rank i // own_logit_rows samples row i."""
        return ceil_div(self.bucket.logit_rows, self.split.tp)

    def owner(self, row: Int) -> Int:
        """Return the rank that keeps the residual of a token row, if the residual is not replicated."""
        return row // self.bucket.row_block % self.split.tp

    def reduce_place(self, row: Int) -> Int:
        """Return the index of token row `row` among its owner's rows. The buffer REDUCE has this order."""
        if self.split.replicated_residual:
            return row
        return row // self.bucket.row_block // self.split.tp * self.bucket.row_block + row % self.bucket.row_block

    def reduce_row(self, from_rank: int, row: Int) -> Int:
        """Return the row of REDUCE where `from_rank` stores its partial sum for token row `row`."""
        return from_rank * self.own_rows + self.reduce_place(row)

    # -- The methods below are used in Python only, and are not translated to C++.

    def first_block(self, position: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first KV block that a token at `position` attends to in any layer; 0 if a layer has no window."""
        return np.maximum(position.astype(np.int64) + 1 - max(self.model.spans), 0) // self.bucket.kv_block

    def block_rows(self, block: Int) -> tuple[Int, Int]:
        """Return the first token row of a row block, and the row after its last one."""
        first = block * self.bucket.row_block
        return first, np.minimum(first + self.bucket.row_block, self.bucket.tokens)

    def owners(self, row: int) -> range:
        """Return the ranks that keep the residual of a token row."""
        owner = self.owner(row)
        return range(self.split.tp) if self.split.replicated_residual else range(owner, owner + 1)

    @cached_property
    def ranks(self) -> list[Dims]:
        """The sizes as each rank sees them."""
        return [self if split is self.split else replace(self, split=split) for split in self.split.ranks]

    @cached_property
    def flat(self) -> dict[str, float]:
        """All sizes by name, in the order of DIM_FIELDS. They are cached, because every launch compares them."""
        sizes = vars(self.model) | vars(self.split) | vars(self.bucket) | vars(self.worker)
        return {name: sizes[name] for name, _ in DIM_FIELDS}

    @cached_property
    def native(self) -> CDims:
        """The sizes as a C++ struct, which native functions take."""
        return CDims(*self.flat.values())

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
        """Return a copy in which some sizes have the values in `sizes`, named as in DIM_FIELDS."""
        return Dims.of(**self.flat | sizes)


def ceil_div(a: Int, b: int) -> Int:
    """Return a / b, rounded up. Also works for NumPy arrays."""
    return -(-a // b)


def start(units: int, ranks: int, rank: int) -> int:
    """Return a rank's first unit (such as a head) if `units` units are divided among `ranks` ranks. For `rank` =
    `ranks`, return `units`."""
    return rank * (units // ranks) + min(rank, units % ranks)


def shard(columns: int, ranks: int, rank: int) -> int:
    """The first column of a rank's shard of `columns` columns. For `rank` = `ranks`, return the number of columns."""
    return min(columns, SHARD_UNIT * start(ceil_div(columns, SHARD_UNIT), ranks, rank))


_RECORDS = {
    record: tuple(f.name for f in fields(record) if f.name != "model") for record in (ModelSizes, Split, Bucket, Worker)
}
# The names and types of all sizes, in the order in which the C++ struct has them.
DIM_FIELDS: tuple[tuple[str, type], ...] = tuple(
    (f.name, float if f.type == "float" else int) for record in _RECORDS for f in fields(record) if f.name != "model"
)
# The sizes that are compile-time constants in a CUDA interpreter for one token row a step. Sizes that depend on a
# server's limits are left out, because they differ between programs, and each difference would need another build.
FIXED_SIZES = tuple(
    name
    for name, _ in DIM_FIELDS
    if name not in ("max_seqs", "max_context", "items", "attention_slots", "partials", "bias_entries", "mask_rows")
)


class CDims(ctypes.Structure):
    """The C++ struct `mk::Dims` of csrc/common/isa.h."""

    _fields_ = tuple((name, ctypes.c_float if kind is float else ctypes.c_int32) for name, kind in DIM_FIELDS)
