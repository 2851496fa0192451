"""Declares every buffer that an operation can use: weights, activations, state and outputs, with shapes and types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import lru_cache
from typing import NamedTuple

from .dims import Bucket, Dims, ModelSizes, Shape, Split
from .dtypes import Dtype


class Space(Enum):
    """The purpose of a buffer, which determines how long its contents are needed."""

    WEIGHT = "weight"  # read-only, from the checkpoint; a backend may store it in another layout
    ACTIVATION = "activation"  # needed during one launch; in the symmetric heap, at the same offset on each rank
    STATE = "state"  # kept from one launch to the next: the KV cache and the token history
    OUTPUT = "output"  # read by the host after a launch


Sizes = Callable[[ModelSizes, Split, Bucket], tuple[int, ...]]


class Share(NamedTuple):
    """The rows or columns [first, first + size) out of `whole`."""

    whole: int
    first: int
    size: int


# A function that says which rows or columns of a matrix a rank has.
Axis = Callable[[Split], Share]


@dataclass(frozen=True, eq=False)  # objects are compared by identity, which caches do fast
class WeightSpec:
    """Declares a weight buffer, which has vectors or matrices.

    `rows`        which rows a rank has of each vector or matrix (of one expert if `per_expert`)
    `columns`     which columns a rank has of each row; None for vectors, whose rows have one element
    `folded`      if not None, the rows form an array whose last axis has this length
    `rotated`     RoPE rotates the rows of the first `rotated` vectors or matrices: those of q and k
    `norm`        the buffer has the scales of an RMS norm
    `per_expert`  in a layer with experts, each expert has its own weights
    """

    rows: tuple[Axis, ...]
    columns: Axis | None = None
    folded: Callable[[Split], int] | None = None
    rotated: int = 0
    norm: bool = False
    per_expert: bool = False

    def shape(self, split: Split) -> tuple[int, ...]:
        """Return the shape of a rank's part of the buffer in one layer, for one expert if there are experts."""
        shape: tuple[int, ...] = (sum(axis(split).size for axis in self.rows),)
        if self.folded is not None:
            last = self.folded(split)
            shape = (shape[0] // last if last else len(self.rows), last)
        return shape if self.columns is None else (*shape, self.columns(split).size)


@dataclass(frozen=True)
class BufferSpec:
    """Declares a buffer. `shape` returns the shape of one rank's copy in elements, row-major. Its second argument is
    the number of KV pages, which is known only when a backend is created. If `layered` is true, the buffer has one such
    array per layer. The dtype None means the compute dtype (f32 or bf16).

    For K and V quantised as Q8_0, the shape is in bytes. A KV page then stores the head_dim elements of a head in
    groups of KV_UNIT elements; the last group may be shorter. Each group has first the scales of all tokens of the
    page, and then their values, in the order that `cache_bytes` in context.py defines.
    """

    space: Space
    dtype: Dtype | None
    shape: Callable[[Dims, int], tuple[int, ...]]
    what: str
    layered: bool = False
    weight: WeightSpec | None = None

    @property
    def matrix(self) -> bool:
        """Whether the buffer has weight matrices. A backend may store them in another layout or in fewer bits."""
        return self.weight is not None and self.weight.columns is not None

    @property
    def per_expert(self) -> bool:
        return self.weight is not None and self.weight.per_expert

    def layers(self, model: Shape) -> range:
        """The numbers of the layers for which the buffer has an array. A buffer without layers counts as one layer."""
        return range(model.layers if self.layered else 1)

    def resolve_dtype(self, model: ModelSizes) -> Dtype:
        if model.quantised_kv and self.space is Space.STATE and self.dtype is None:  # K or V
            return Dtype.Q8_0
        return Dtype(model.dtype) if self.dtype is None else self.dtype


def _all(size: Callable[[ModelSizes], int]) -> Axis:
    return lambda split: Share(size(split.model), 0, size(split.model))


def _q(split: Split) -> Share:
    size, split = split.model.head_dim, _normed(split)
    return Share(split.model.heads * size, split.first_head * size, split.q_cols)


def _kv(split: Split) -> Share:
    size, split = split.model.head_dim, _normed(split)
    return Share(split.model.kv_heads * size, split.first_kv_head * size, split.kv_cols)


def _normed(split: Split) -> Split:
    """Return how ranks share the rows of q, k and v. If norms span all heads, each rank has the rows of all heads."""
    return Split(split.model) if split.qkv_rows > split.qkv_cols else split


def _attention_columns(split: Split) -> Share:
    first = 0 if split.replicated_o else split.first_head * split.model.head_dim
    return Share(split.model.heads * split.model.head_dim, first, split.o_cols)


def _ffn(split: Split) -> Share:
    return Share(split.model.ffn, split.first_ffn, split.rank_ffn)


def _matrix(what: str, weight: WeightSpec, *, layered: bool = True) -> BufferSpec:
    return BufferSpec(Space.WEIGHT, None, lambda d, p: _stacked(weight, d.split), what, layered, weight)


def _vector(what: str, weight: WeightSpec, *, layered: bool = True) -> BufferSpec:
    return replace(_matrix(what, weight, layered=layered), dtype=Dtype.F32)


@lru_cache(maxsize=1024)
def _stacked(weight: WeightSpec, split: Split) -> tuple[int, ...]:
    return (*(split.stack if weight.per_expert else ()), *weight.shape(split))


_hidden, _vocab = _all(lambda m: m.hidden), _all(lambda m: m.vocab)
_routed, _pairs = _all(lambda m: m.routed_experts), _all(lambda m: m.head_dim // 2)
_q_norm = _all(lambda m: m.head_dim * (m.heads if m.whole_norms else 1))
_k_norm = _all(lambda m: m.head_dim * (m.kv_heads if m.whole_norms else 1))
_QKV, _GATE_UP, _SCALES = (_q, _kv, _kv), (_ffn, _ffn), WeightSpec((_hidden,), norm=True)


def _use(space: Space, dtype: Dtype | None, shape: Sizes, what: str) -> BufferSpec:
    return BufferSpec(space, dtype, lambda d, p: shape(d.model, d.split, d.bucket), what)


def _cache(page: Callable[[ModelSizes, Bucket], tuple[int, int]], what: str) -> BufferSpec:
    """Declare the K or V cache, with the shape [pages, KV heads, *page]."""
    return BufferSpec(
        Space.STATE, None, lambda d, p: (p, d.split.rank_kv_heads, *page(d.model, d.bucket)), what, layered=True
    )


_A, _S, _O = Space.ACTIVATION, Space.STATE, Space.OUTPUT
_F, _I = Dtype.F32, Dtype.I32


# In W_QKV and B_QKV, the two rows of a RoPE pair of q or k are adjacent, as in GGUF files. Row 2i of a head is row i in
# Hugging Face's order, and row 2i+1 is row i + head_dim/2. Attention scores do not depend on this order.
class Buffer(IntEnum):
    """A buffer. Its value is its number in program files, in the order of this list."""

    # -- weights
    EMBED = _matrix("token embeddings", WeightSpec((_vocab,), _hidden), layered=False)
    INV_FREQ = _vector(
        "RoPE: a frequency for each pair of elements, then a factor for each",
        WeightSpec((_pairs, _pairs), folded=lambda s: s.model.head_dim // 2),
    )
    ATTN_NORM = _vector("RMS norm scales before attention", _SCALES)
    W_QKV = _matrix("QKV projection: q heads, k heads, v heads", WeightSpec(_QKV, _hidden, rotated=2))
    B_QKV = _vector("bias of W_QKV", WeightSpec(_QKV, rotated=2))
    W_O = _matrix("attention output projection", WeightSpec((_hidden,), _attention_columns))
    B_O = _vector("bias of W_O", WeightSpec((_hidden,)))
    MLP_NORM = _vector("RMS norm scales before the MLP", _SCALES)
    W_GATE_UP = _matrix(
        "gate projection, then up projection",
        WeightSpec(_GATE_UP, _hidden, folded=lambda s: s.rank_ffn, per_expert=True),
    )
    B_GATE_UP = _vector("bias of W_GATE_UP", WeightSpec(_GATE_UP, folded=lambda s: s.rank_ffn, per_expert=True))
    W_DOWN = _matrix("down projection", WeightSpec((_hidden,), _ffn, per_expert=True))
    B_DOWN = _vector("bias of W_DOWN", WeightSpec((_hidden,), per_expert=True))
    FINAL_NORM = _vector("RMS norm scales before the LM head", _SCALES, layered=False)
    LM_HEAD = _matrix(
        "LM head; rows of EMBED if embeddings are tied",
        WeightSpec((lambda s: Share(s.model.vocab, s.first_vocab, s.rank_vocab),), _hidden),
        layered=False,
    )
    # -- activations
    ROPE = _use(_A, _F, lambda m, s, b: (b.tokens, m.head_dim), "cos and sin of each RoPE pair, interleaved")
    X = _use(_A, _F, lambda m, s, b: (b.tokens, m.hidden), "residual stream")
    H = _use(_A, None, lambda m, s, b: (b.tokens, m.hidden), "normalised residual")
    Q = _use(_A, None, lambda m, s, b: (b.tokens, s.q_cols), "rotated queries")
    ATTN = _use(_A, None, lambda m, s, b: (b.tokens, s.o_cols), "attention output, one head after another")
    ACT = _use(
        _A,
        None,
        lambda m, s, b: (b.tokens * max(m.experts_per_token, 1), s.rank_ffn),
        "silu(gate) * up; with experts, a row for each expert of a token",
    )
    Y = _use(_A, None, lambda m, s, b: (b.logit_rows, m.hidden), "rows that get logits, after the final norm")
    LOGITS = _use(_O, _F, lambda m, s, b: (b.logit_rows, m.vocab), "raw logits")
    PARTIALS = _use(
        _A,
        _F,
        lambda m, s, b: (b.partials, m.group_size, m.head_dim + 2),
        "attention's partial results for KV blocks: maximum, sum and output",
    )
    SPLITS = _use(
        _A,
        _I,
        lambda m, s, b: (b.items,),
        "finished items of each split (items that share rows); the last item to finish resets it to 0",
    )
    # -- state
    K_CACHE = _cache(lambda m, b: (m.kv_row, b.kv_page), "keys, [element][token] in a KV page; Q8_0 if quantised")
    V_CACHE = _cache(lambda m, b: (b.kv_page, m.kv_row), "values, [token][element] in a KV page; Q8_0 if quantised")
    HISTORY = _use(_S, _I, lambda m, s, b: (b.max_seqs, b.max_context + 1), "each sequence's sampled ids, or all")
    # -- outputs
    TOKENS_OUT = _use(_O, _I, lambda m, s, b: (b.logit_rows,), "sampled (or scored) token ids")
    LOGPROBS_OUT = _use(_O, _F, lambda m, s, b: (b.logit_rows,), "log-softmax of raw logits at TOKENS_OUT")
    # -- between ranks
    REDUCE = BufferSpec(
        _A,
        None,
        lambda d, p: (d.split.tp * d.own_rows if d.split.tp > 1 else 0, d.model.hidden),
        "partial sums of a projection, for rows whose residual this rank keeps: own_rows rows from each rank in turn",
    )
    QK_NORM = _vector(
        "RMS norm scales of q, then of k: those of one head, or of all heads if norms span all heads",
        WeightSpec((_q_norm, _k_norm), folded=lambda s: s.model.head_dim, rotated=2, norm=True),
    )
    # -- experts
    W_ROUTER = _matrix("router: a row for each logit", WeightSpec((_routed, _all(lambda m: m.shared_gate)), _hidden))
    ROUTES = _use(_A, _I, lambda m, s, b: (b.tokens, m.experts_per_token), "experts of each token, best first")
    ROUTE_WEIGHTS = _use(_A, _F, lambda m, s, b: (b.tokens, m.experts_per_token), "weights of the experts in ROUTES")
    EXPERTS_OUT = _use(
        _A,
        None,
        lambda m, s, b: (b.tokens * m.experts_per_token, m.hidden),
        "results of experts: a row for each expert of a token",
    )
    # -- buffers of models that normalise the outputs of attention and of the MLP before adding them to the residual
    SUBLAYER = _use(
        _A,
        _F,
        lambda m, s, b: (b.tokens * m.post_norms, m.hidden),
        "result of attention or the MLP before its norm",
    )
    POST_ATTN_NORM = _vector("RMS norm scales of attention's result", _SCALES)
    POST_MLP_NORM = _vector("RMS norm scales of the MLP's result", _SCALES)
    # -- norms over all heads
    QKV = _use(_A, _F, lambda m, s, b: (b.tokens * m.whole_norms, s.qkv_rows), "q, k and v, not normalised yet")
    # -- attention sinks
    SINKS = _vector(
        "a score of each head that no token has",
        WeightSpec((lambda s: Share(s.model.heads, s.first_head, s.rank_heads),)),
    )
    B_ROUTER = _vector("bias of W_ROUTER", WeightSpec((_routed,)))

    spec: BufferSpec

    def __new__(cls, spec: BufferSpec) -> Buffer:
        made = int.__new__(cls, len(cls.__members__))
        made._value_, made.spec = len(cls.__members__), spec
        return made


BUFFERS: dict[Buffer, BufferSpec] = {buffer: buffer.spec for buffer in Buffer}


def given(buffer: Buffer | None) -> Buffer:
    """Return `buffer`, which is not None because the phase's operation requires it. This narrows the type for mypy."""
    assert buffer is not None
    return buffer


def itemsize(model: ModelSizes) -> int:
    """Return the bytes of an element in the compute dtype."""
    return Dtype(model.dtype).itemsize


def kv_bytes(model: ModelSizes) -> int:
    """Return the number of bytes that K and V of one token take in the cache, for one KV head of one layer."""
    return 2 * model.kv_row * BUFFERS[Buffer.K_CACHE].resolve_dtype(model).itemsize


def weight(buffer: Buffer) -> WeightSpec:
    """Return the declaration of a weight buffer."""
    spec = BUFFERS[buffer].weight
    assert spec is not None, f"{buffer.name} is not a weight"
    return spec


def weight_shape(buffer: Buffer, split: Split) -> tuple[int, ...]:
    """Return the shape of a rank's part of a weight buffer, without the axis for layers."""
    return _stacked(weight(buffer), split)


def row_shares(buffer: Buffer, split: Split) -> list[Share]:
    """Return which rows of a weight buffer rank `split.rank` has: one entry per matrix or vector, in the buffer's
    order. In a layer with experts, each expert's matrices have their own entries, empty if the rank lacks the
    expert."""
    shares = [share for axis in weight(buffer).rows if (share := axis(split)).whole]
    if not (split.model.experts and weight(buffer).per_expert):
        return shares
    own = range(split.first_expert, split.first_expert + split.rank_experts)
    none = [share._replace(size=0) for share in shares]
    return [share for e in range(split.model.experts) for share in (shares if e in own else none)]


def column_share(buffer: Buffer, split: Split) -> Share:
    """Return which columns rank `split.rank` has of each row of a weight buffer."""
    columns = weight(buffer).columns
    return Share(1, 0, 1) if columns is None else columns(split)
