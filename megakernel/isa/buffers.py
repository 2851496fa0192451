"""Declares every buffer that a phase can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from .dims import Dims, ModelSizes, Split
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


@dataclass(frozen=True)
class BufferSpec:
    """The shape of one rank's copy in elements, row-major. A dtype of None means the program's compute dtype (f32 or
    bf16).

    A `layered` buffer has one copy per layer: the layer is a further axis in front of `shape`. The number of pages in
    the KV pool is known only when a program is bound, so it is an argument of `shape`.

    Quantised K and V are Q8_0, and their shape is in bytes. In each KV page, the head_dim elements of a head are
    divided into blocks of KV_UNIT elements; the last block may have fewer. A block has the scales of all tokens of the
    page, then the values, ordered by element in K and by token in V.
    """

    buffer: Buffer
    space: Space
    dtype: Dtype | None  # None means the compute dtype
    shape: Callable[[Dims, int], tuple[int, ...]]
    what: str
    layered: bool = False
    part: Callable[[Split], tuple[int, ...]] | None = None  # a weight's shape, which depends on nothing but the split

    @property
    def matrix(self) -> bool:
        """Whether the buffer is one or several weight matrices, which a backend may repack or store in fewer bits."""
        return self.space is Space.WEIGHT and self.dtype is None

    def resolve_dtype(self, model: ModelSizes) -> Dtype:
        if model.quantised_kv and self.buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
            return Dtype.Q8_0
        return Dtype(model.dtype) if self.dtype is None else self.dtype


def _weight(
    buffer: Buffer, dtype: Dtype | None, part: Callable[[Split], tuple[int, ...]], what: str, layered: bool = False
) -> BufferSpec:
    return BufferSpec(buffer, Space.WEIGHT, dtype, lambda d, p: part(d.split), what, layered, part)


_A, _S, _O = Space.ACTIVATION, Space.STATE, Space.OUTPUT
_F, _I = Dtype.F32, Dtype.I32
_B = Buffer

# The q and k rows of W_QKV and B_QKV are stored so that RoPE pairs are adjacent, as in GGUF files: row 2i of a head is
# row i of Hugging Face's order, and row 2i+1 is row i + head_dim/2. Attention scores do not depend on this order.
_SPECS: tuple[BufferSpec, ...] = (
    # -- weights
    _weight(_B.EMBED, None, lambda s: (s.model.vocab, s.model.hidden), "token embeddings"),
    _weight(_B.INV_FREQ, _F, lambda s: (s.model.head_dim // 2,), "RoPE inverse frequencies, including RoPE scaling"),
    _weight(_B.ATTN_NORM, _F, lambda s: (s.model.hidden,), "RMS norm scales before attention", True),
    _weight(
        _B.W_QKV,
        None,
        lambda s: (s.qkv_cols, s.model.hidden),
        "QKV projection: q heads, then k heads, then v heads",
        True,
    ),
    _weight(_B.B_QKV, _F, lambda s: (s.qkv_cols,), "bias of W_QKV", True),
    _weight(_B.W_O, None, lambda s: (s.model.hidden, s.o_cols), "attention output projection", True),
    _weight(_B.B_O, _F, lambda s: (s.model.hidden,), "bias of W_O", True),
    _weight(_B.MLP_NORM, _F, lambda s: (s.model.hidden,), "RMS norm scales before the MLP", True),
    _weight(_B.W_GATE_UP, None, lambda s: (2, s.rank_ffn, s.model.hidden), "gate projection, then up projection", True),
    _weight(_B.B_GATE_UP, _F, lambda s: (2, s.rank_ffn), "bias of W_GATE_UP", True),
    _weight(_B.W_DOWN, None, lambda s: (s.model.hidden, s.rank_ffn), "down projection", True),
    _weight(_B.B_DOWN, _F, lambda s: (s.model.hidden,), "bias of W_DOWN", True),
    _weight(_B.FINAL_NORM, _F, lambda s: (s.model.hidden,), "RMS norm scales before the LM head"),
    _weight(
        _B.LM_HEAD, None, lambda s: (s.rank_vocab, s.model.hidden), "LM head; the rows of EMBED if embeddings are tied"
    ),
    # -- activations
    BufferSpec(
        _B.ROPE, _A, _F, lambda d, p: (d.bucket.tokens, d.model.head_dim), "cos and sin of each RoPE pair, interleaved"
    ),
    BufferSpec(_B.X, _A, _F, lambda d, p: (d.bucket.tokens, d.model.hidden), "residual stream"),
    BufferSpec(_B.H, _A, None, lambda d, p: (d.bucket.tokens, d.model.hidden), "normalised residual"),
    BufferSpec(_B.Q, _A, None, lambda d, p: (d.bucket.tokens, d.split.q_cols), "rotated queries"),
    BufferSpec(
        _B.ATTN, _A, None, lambda d, p: (d.bucket.tokens, d.split.o_cols), "attention output, one head after another"
    ),
    BufferSpec(_B.ACT, _A, None, lambda d, p: (d.bucket.tokens, d.split.rank_ffn), "silu(gate) * up"),
    BufferSpec(
        _B.Y, _A, None, lambda d, p: (d.bucket.logit_rows, d.model.hidden), "rows that get logits, after the final norm"
    ),
    BufferSpec(_B.LOGITS, _O, _F, lambda d, p: (d.bucket.logit_rows, d.model.vocab), "raw logits"),
    BufferSpec(
        _B.PARTIALS,
        _A,
        _F,
        lambda d, p: (d.bucket.partials, d.model.group_size, d.model.head_dim + 2),
        "partial softmax (maximum, sum, output) per query row, KV head and KV block",
    ),
    BufferSpec(
        _B.SPLITS,
        _A,
        _I,
        lambda d, p: (d.bucket.items,),
        "number of finished items of each split; the item that finishes last resets the number to 0",
    ),
    # -- state
    BufferSpec(
        _B.K_CACHE,
        _S,
        None,
        lambda d, p: (p, d.split.rank_kv_heads, d.model.kv_row, d.bucket.kv_page),
        "keys [element][token]; Q8_0 if quantised_kv",
        True,
    ),
    BufferSpec(
        _B.V_CACHE,
        _S,
        None,
        lambda d, p: (p, d.split.rank_kv_heads, d.bucket.kv_page, d.model.kv_row),
        "values [token][element]; Q8_0 if quantised_kv",
        True,
    ),
    BufferSpec(
        _B.HISTORY,
        _S,
        _I,
        lambda d, p: (d.bucket.max_seqs, d.bucket.max_context + 1),
        "token ids of the request in each slot",
    ),
    # -- outputs
    BufferSpec(_B.TOKENS_OUT, _O, _I, lambda d, p: (d.bucket.logit_rows,), "sampled (or scored) token ids"),
    BufferSpec(
        _B.LOGPROBS_OUT,
        _O,
        _F,
        lambda d, p: (d.bucket.logit_rows,),
        "log-softmax of raw logits at the token in TOKENS_OUT",
    ),
    # -- between ranks
    BufferSpec(
        _B.REDUCE,
        _A,
        None,
        lambda d, p: (d.split.tp * d.own_rows if d.split.tp > 1 else 0, d.model.hidden),
        "partial sums of a projection: own_rows rows from each rank, in the order of the ranks",
    ),
    _weight(_B.QK_NORM, _F, lambda s: (2, s.model.head_dim), "RMS norm scales of q heads and k heads", True),
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
    part = BUFFERS[buffer].part
    assert part is not None, f"{buffer.name} is not a weight"
    return part(split)
