"""Declares every buffer that an operation can use: weights, activations, state and outputs, with shapes and types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from .dims import Bucket, Dims, ModelSizes, Split
from .dtypes import Dtype


class Space(Enum):
    """The purpose of a buffer, which determines how long its contents are needed."""

    WEIGHT = "weight"  # read-only, from the checkpoint; a backend may store it in another layout
    ACTIVATION = "activation"  # needed during one launch; in the symmetric heap, at the same offset on each rank
    STATE = "state"  # kept from one launch to the next: the KV cache and the token history
    OUTPUT = "output"  # read by the host after a launch


class Buffer(IntEnum):
    EMBED = 0
    INV_FREQ = 1
    ATTN_NORM = 2
    W_QKV = 3
    B_QKV = 4
    W_O = 5
    B_O = 6
    MLP_NORM = 7
    W_GATE_UP = 8
    B_GATE_UP = 9
    W_DOWN = 10
    B_DOWN = 11
    FINAL_NORM = 12
    LM_HEAD = 13
    ROPE = 14
    X = 15
    H = 16
    Q = 17
    ATTN = 18
    ACT = 19
    Y = 20
    LOGITS = 21
    PARTIALS = 22
    SPLITS = 23
    K_CACHE = 24
    V_CACHE = 25
    HISTORY = 26
    TOKENS_OUT = 27
    LOGPROBS_OUT = 28
    REDUCE = 29
    QK_NORM = 30
    W_ROUTER = 31
    ROUTES = 32
    ROUTE_WEIGHTS = 33
    EXPERTS_OUT = 34
    SUBLAYER = 35
    POST_ATTN_NORM = 36
    POST_MLP_NORM = 37
    QKV = 38
    SINKS = 39
    B_ROUTER = 40


Part = Callable[[ModelSizes, Split], tuple[int, ...]]
Sizes = Callable[[ModelSizes, Split, Bucket], tuple[int, ...]]


@dataclass(frozen=True)
class BufferSpec:
    """Declares a buffer. `shape` returns the shape of one rank's copy in elements, row-major. Its second argument is
    the number of KV pages, which is known only when a backend is created. If `layered` is true, the buffer has one such
    array per layer. The dtype None means the compute dtype (f32 or bf16).

    For K and V quantised as Q8_0, the shape is in bytes. A KV page then stores the head_dim elements of a head in
    groups of KV_UNIT elements; the last group may be shorter. Each group has first the scales of all tokens of the
    page, and then their values, in the order that `cache_bytes` in context.py defines.
    """

    buffer: Buffer
    space: Space
    dtype: Dtype | None
    shape: Callable[[Dims, int], tuple[int, ...]]
    what: str
    layered: bool = False
    # A weight's shape on one rank (for one expert if `per_expert`), which depends only on model and ranks.
    part: Part | None = None
    per_expert: bool = False  # in a layer with experts, each expert has its own weights

    @property
    def matrix(self) -> bool:
        """Whether the buffer has weight matrices. A backend may store them in another layout or in fewer bits."""
        return self.space is Space.WEIGHT and self.dtype is None

    def resolve_dtype(self, model: ModelSizes) -> Dtype:
        if model.quantised_kv and self.buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
            return Dtype.Q8_0
        return Dtype(model.dtype) if self.dtype is None else self.dtype


def _weight(
    buffer: Buffer, dtype: Dtype | None, part: Part, what: str, layered: bool = False, per_expert: bool = False
) -> BufferSpec:
    return BufferSpec(
        buffer, Space.WEIGHT, dtype, lambda d, p: weight_shape(buffer, d.split), what, layered, part, per_expert
    )


def _use(buffer: Buffer, space: Space, dtype: Dtype | None, shape: Sizes, what: str) -> BufferSpec:
    return BufferSpec(buffer, space, dtype, lambda d, p: shape(d.model, d.split, d.bucket), what)


def _cache(buffer: Buffer, page: Callable[[ModelSizes, Bucket], tuple[int, int]], what: str) -> BufferSpec:
    """Declare the K or V cache, with the shape [pages, KV heads, *page]."""
    return BufferSpec(
        buffer, Space.STATE, None, lambda d, p: (p, d.split.rank_kv_heads, *page(d.model, d.bucket)), what, layered=True
    )


_A, _S, _O = Space.ACTIVATION, Space.STATE, Space.OUTPUT
_F, _I = Dtype.F32, Dtype.I32
_B = Buffer

# In W_QKV and B_QKV, the two rows of a RoPE pair of q or k are adjacent, as in GGUF files: row 2i of a head is row i in
# Hugging Face's order, and row 2i+1 is row i + head_dim/2. Attention scores do not depend on this order.
_SPECS: tuple[BufferSpec, ...] = (
    # -- weights
    _weight(_B.EMBED, None, lambda m, s: (m.vocab, m.hidden), "token embeddings"),
    _weight(
        _B.INV_FREQ,
        _F,
        lambda m, s: (2, m.head_dim // 2),
        "RoPE: a frequency for each pair of elements, then a factor for each",
        True,
    ),
    _weight(_B.ATTN_NORM, _F, lambda m, s: (m.hidden,), "RMS norm scales before attention", True),
    _weight(_B.W_QKV, None, lambda m, s: (s.qkv_rows, m.hidden), "QKV projection: q heads, k heads, v heads", True),
    _weight(_B.B_QKV, _F, lambda m, s: (s.qkv_rows,), "bias of W_QKV", True),
    _weight(_B.W_O, None, lambda m, s: (m.hidden, s.o_cols), "attention output projection", True),
    _weight(_B.B_O, _F, lambda m, s: (m.hidden,), "bias of W_O", True),
    _weight(_B.MLP_NORM, _F, lambda m, s: (m.hidden,), "RMS norm scales before the MLP", True),
    _weight(
        _B.W_GATE_UP, None, lambda m, s: (2, s.rank_ffn, m.hidden), "gate projection, then up projection", True, True
    ),
    _weight(_B.B_GATE_UP, _F, lambda m, s: (2, s.rank_ffn), "bias of W_GATE_UP", True, True),
    _weight(_B.W_DOWN, None, lambda m, s: (m.hidden, s.rank_ffn), "down projection", True, True),
    _weight(_B.B_DOWN, _F, lambda m, s: (m.hidden,), "bias of W_DOWN", True, True),
    _weight(_B.FINAL_NORM, _F, lambda m, s: (m.hidden,), "RMS norm scales before the LM head"),
    _weight(_B.LM_HEAD, None, lambda m, s: (s.rank_vocab, m.hidden), "LM head; rows of EMBED if embeddings are tied"),
    # -- activations
    _use(_B.ROPE, _A, _F, lambda m, s, b: (b.tokens, m.head_dim), "cos and sin of each RoPE pair, interleaved"),
    _use(_B.X, _A, _F, lambda m, s, b: (b.tokens, m.hidden), "residual stream"),
    _use(_B.H, _A, None, lambda m, s, b: (b.tokens, m.hidden), "normalised residual"),
    _use(_B.Q, _A, None, lambda m, s, b: (b.tokens, s.q_cols), "rotated queries"),
    _use(_B.ATTN, _A, None, lambda m, s, b: (b.tokens, s.o_cols), "attention output, one head after another"),
    _use(
        _B.ACT,
        _A,
        None,
        lambda m, s, b: (b.tokens * max(m.experts_per_token, 1), s.rank_ffn),
        "silu(gate) * up; with experts, a row for each expert of a token",
    ),
    _use(_B.Y, _A, None, lambda m, s, b: (b.logit_rows, m.hidden), "rows that get logits, after the final norm"),
    _use(_B.LOGITS, _O, _F, lambda m, s, b: (b.logit_rows, m.vocab), "raw logits"),
    _use(
        _B.PARTIALS,
        _A,
        _F,
        lambda m, s, b: (b.partials, m.group_size, m.head_dim + 2),
        "attention's partial results for KV blocks: maximum, sum and output",
    ),
    _use(
        _B.SPLITS,
        _A,
        _I,
        lambda m, s, b: (b.items,),
        "finished items of each split (items that share rows); the last item to finish resets it to 0",
    ),
    # -- state
    _cache(
        _B.K_CACHE,
        lambda m, b: (m.kv_row, b.kv_page),
        "keys, [element][token] in a KV page; Q8_0 if quantised",
    ),
    _cache(
        _B.V_CACHE,
        lambda m, b: (b.kv_page, m.kv_row),
        "values, [token][element] in a KV page; Q8_0 if quantised",
    ),
    _use(_B.HISTORY, _S, _I, lambda m, s, b: (b.max_seqs, b.max_context + 1), "all token ids of each running request"),
    # -- outputs
    _use(_B.TOKENS_OUT, _O, _I, lambda m, s, b: (b.logit_rows,), "sampled (or scored) token ids"),
    _use(_B.LOGPROBS_OUT, _O, _F, lambda m, s, b: (b.logit_rows,), "log-softmax of raw logits at TOKENS_OUT"),
    # -- between ranks
    BufferSpec(
        _B.REDUCE,
        _A,
        None,
        lambda d, p: (d.split.tp * d.own_rows if d.split.tp > 1 else 0, d.model.hidden),
        "partial sums of a projection, for rows whose residual this rank keeps: own_rows rows from each rank in turn",
    ),
    _weight(
        _B.QK_NORM,
        _F,
        lambda m, s: (m.heads + m.kv_heads if m.whole_norms else 2, m.head_dim),
        "RMS norm scales of q heads and k heads, of each head if norms span all heads",
        True,
    ),
    # -- experts
    _weight(_B.W_ROUTER, None, lambda m, s: (m.experts, m.hidden), "router: a row for each expert", True),
    _use(_B.ROUTES, _A, _I, lambda m, s, b: (b.tokens, m.experts_per_token), "experts of each token, best first"),
    _use(_B.ROUTE_WEIGHTS, _A, _F, lambda m, s, b: (b.tokens, m.experts_per_token), "weights of the experts in ROUTES"),
    _use(
        _B.EXPERTS_OUT,
        _A,
        None,
        lambda m, s, b: (b.tokens * m.experts_per_token, m.hidden),
        "results of experts: a row for each expert of a token",
    ),
    # -- buffers of models that normalise the outputs of attention and of the MLP before adding them to the residual
    _use(
        _B.SUBLAYER,
        _A,
        _F,
        lambda m, s, b: (b.tokens * m.post_norms, m.hidden),
        "result of attention or the MLP before its norm",
    ),
    _weight(_B.POST_ATTN_NORM, _F, lambda m, s: (m.hidden,), "RMS norm scales of attention's result", True),
    _weight(_B.POST_MLP_NORM, _F, lambda m, s: (m.hidden,), "RMS norm scales of the MLP's result", True),
    # -- norms over all heads
    _use(_B.QKV, _A, _F, lambda m, s, b: (b.tokens * m.whole_norms, s.qkv_rows), "q, k and v, not normalised yet"),
    # -- attention sinks
    _weight(_B.SINKS, _F, lambda m, s: (s.rank_heads,), "a score of each head that no token has", True),
    _weight(_B.B_ROUTER, _F, lambda m, s: (m.experts,), "bias of W_ROUTER", True),
)

BUFFERS: dict[Buffer, BufferSpec] = {spec.buffer: spec for spec in _SPECS}
if list(BUFFERS) != list(Buffer):
    raise AssertionError("every Buffer needs exactly one BufferSpec, in order")


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


def weight_shape(buffer: Buffer, split: Split) -> tuple[int, ...]:
    """Return the shape of a rank's part of a weight buffer, without the axis for layers."""
    spec = BUFFERS[buffer]
    assert spec.part is not None, f"{buffer.name} is not a weight"
    return (*(split.stack if spec.per_expert else ()), *spec.part(split.model, split))
