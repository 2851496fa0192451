"""Declares every buffer that a phase can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from .dims import Bucket, Dims, ModelSizes, Split
from .dtypes import Dtype


class Space(Enum):
    """Who owns a buffer's bytes and how long they live."""

    WEIGHT = "weight"  # read-only, from the checkpoint; a backend may repack it
    ACTIVATION = "activation"  # lives for one launch, in the symmetric heap (same offset on each rank)
    STATE = "state"  # lives across launches: KV cache and token history
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
    """The shape of one rank's copy in elements, row-major. The dtype None means the compute dtype (f32 or bf16).

    A `layered` buffer has one copy per layer: the layer is a further axis in front of `shape`. The number of pages in
    the KV pool is known only when a program is bound, so it is an argument of `shape`.

    Quantised K and V are Q8_0, and their shape is in bytes. In each KV page, the head_dim elements of a head are
    divided into blocks of KV_UNIT elements; the last block may have fewer. A block has the scales of all tokens of the
    page, then the values, ordered by element in K and by token in V.
    """

    buffer: Buffer
    space: Space
    dtype: Dtype | None
    shape: Callable[[Dims, int], tuple[int, ...]]
    what: str
    layered: bool = False
    part: Part | None = None  # a weight's shape, of one expert if `per_expert`; depends on nothing but the split
    per_expert: bool = False  # whether the experts of a layer, if it has any, have weights of their own

    @property
    def matrix(self) -> bool:
        """Whether the buffer is one or several weight matrices, which a backend may repack or store in fewer bits."""
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
    """Declare K or V, [pages, KV heads, *page]."""
    return BufferSpec(
        buffer, Space.STATE, None, lambda d, p: (p, d.split.rank_kv_heads, *page(d.model, d.bucket)), what, layered=True
    )


_A, _S, _O = Space.ACTIVATION, Space.STATE, Space.OUTPUT
_F, _I = Dtype.F32, Dtype.I32
_B = Buffer

# The q and k rows of W_QKV and B_QKV are stored so that RoPE pairs are adjacent, as in GGUF files: row 2i of a head is
# row i of Hugging Face's order, and row 2i+1 is row i + head_dim/2. Attention scores do not depend on this order.
_SPECS: tuple[BufferSpec, ...] = (
    # -- weights
    _weight(_B.EMBED, None, lambda m, s: (m.vocab, m.hidden), "token embeddings"),
    _weight(_B.INV_FREQ, _F, lambda m, s: (2, m.head_dim // 2), "RoPE: frequency of each pair, then factors", True),
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
        "silu(gate) * up; a row for each expert of a token",
    ),
    _use(_B.Y, _A, None, lambda m, s, b: (b.logit_rows, m.hidden), "rows that get logits, after the final norm"),
    _use(_B.LOGITS, _O, _F, lambda m, s, b: (b.logit_rows, m.vocab), "raw logits"),
    _use(_B.PARTIALS, _A, _F, lambda m, s, b: (b.partials, m.group_size, m.head_dim + 2), "partial softmax (m, l, o)"),
    _use(_B.SPLITS, _A, _I, lambda m, s, b: (b.items,), "finished items of each split; the last resets it to 0"),
    # -- state
    _cache(_B.K_CACHE, lambda m, b: (m.kv_row, b.kv_page), "keys [element][token]; Q8_0 if quantised_kv"),
    _cache(_B.V_CACHE, lambda m, b: (b.kv_page, m.kv_row), "values [token][element]; Q8_0 if quantised_kv"),
    _use(_B.HISTORY, _S, _I, lambda m, s, b: (b.max_seqs, b.max_context + 1), "token ids of each slot's request"),
    # -- outputs
    _use(_B.TOKENS_OUT, _O, _I, lambda m, s, b: (b.logit_rows,), "sampled (or scored) token ids"),
    _use(_B.LOGPROBS_OUT, _O, _F, lambda m, s, b: (b.logit_rows,), "log-softmax of raw logits at TOKENS_OUT"),
    # -- between ranks
    BufferSpec(
        _B.REDUCE,
        _A,
        None,
        lambda d, p: (d.split.tp * d.own_rows if d.split.tp > 1 else 0, d.model.hidden),
        "partial sums of a projection: own_rows rows from each rank in turn",
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
    _use(_B.ROUTE_WEIGHTS, _A, _F, lambda m, s, b: (b.tokens, m.experts_per_token), "weights of these experts"),
    _use(
        _B.EXPERTS_OUT,
        _A,
        None,
        lambda m, s, b: (b.tokens * m.experts_per_token, m.hidden),
        "results of experts; a row for each expert of a token",
    ),
    # -- norms of what a layer adds to the residual
    _use(_B.SUBLAYER, _A, _F, lambda m, s, b: (b.tokens * m.post_norms, m.hidden), "result of attention or the MLP"),
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
    """Return the buffer that a phase names in a field where its operation needs one."""
    assert buffer is not None
    return buffer


def itemsize(model: ModelSizes) -> int:
    """Return the bytes of an element in the compute dtype."""
    return Dtype(model.dtype).itemsize


def kv_bytes(model: ModelSizes) -> int:
    """Return the number of bytes that K and V of one token and one KV head take in the cache."""
    return 2 * model.kv_row * BUFFERS[Buffer.K_CACHE].resolve_dtype(model).itemsize


def weight_shape(buffer: Buffer, split: Split) -> tuple[int, ...]:
    """The shape of a rank's part of a weight buffer, of one layer if it is layered."""
    spec = BUFFERS[buffer]
    assert spec.part is not None, f"{buffer.name} is not a weight"
    return (*(split.model.stack if spec.per_expert else ()), *spec.part(split.model, split))
