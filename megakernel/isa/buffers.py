"""Declares every buffer that a phase can name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from .dims import Dims
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

    Quantised K and V are Q8_0, and their shape is in bytes. In each KV page, the head_dim elements
    of a head are divided into blocks of KV_UNIT elements; the last block may have fewer. A block
    has the scales of all tokens of the page, then the values, ordered by element in K and by token
    in V.
    """

    buffer: Buffer
    space: Space
    dtype: Dtype | None  # None means the compute dtype
    shape: Callable[[Dims, int], tuple[int, ...]]
    what: str
    layered: bool = False

    @property
    def matrix(self) -> bool:
        """Whether the buffer is one or several weight matrices, which a backend may repack or store in fewer bits."""
        return self.space is Space.WEIGHT and self.dtype is None

    def resolve_dtype(self, dims: Dims) -> Dtype:
        if dims.quantised_kv and self.buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
            return Dtype.Q8_0
        return Dtype(dims.dtype) if self.dtype is None else self.dtype


_W, _A, _S, _O = Space.WEIGHT, Space.ACTIVATION, Space.STATE, Space.OUTPUT
_F, _I = Dtype.F32, Dtype.I32
_B = Buffer

# The q and k rows of W_QKV and B_QKV are stored so that RoPE pairs are adjacent, as in GGUF files: row 2i of a head is
# row i of Hugging Face's order, and row 2i+1 is row i + head_dim/2. Attention scores do not depend on this order.
_SPECS: tuple[BufferSpec, ...] = (
    # -- weights
    BufferSpec(_B.EMBED, _W, None, lambda d, p: (d.vocab, d.hidden), "token embeddings"),
    BufferSpec(
        _B.INV_FREQ, _W, _F, lambda d, p: (d.head_dim // 2,), "RoPE inverse frequencies, including RoPE scaling"
    ),
    BufferSpec(_B.ATTN_NORM, _W, _F, lambda d, p: (d.hidden,), "RMS norm scales before attention", True),
    BufferSpec(
        _B.W_QKV,
        _W,
        None,
        lambda d, p: (d.qkv_cols, d.hidden),
        "QKV projection: q heads, then k heads, then v heads",
        True,
    ),
    BufferSpec(_B.B_QKV, _W, _F, lambda d, p: (d.qkv_cols,), "bias of W_QKV", True),
    BufferSpec(_B.W_O, _W, None, lambda d, p: (d.hidden, d.o_cols), "attention output projection", True),
    BufferSpec(_B.B_O, _W, _F, lambda d, p: (d.hidden,), "bias of W_O", True),
    BufferSpec(_B.MLP_NORM, _W, _F, lambda d, p: (d.hidden,), "RMS norm scales before the MLP", True),
    BufferSpec(
        _B.W_GATE_UP, _W, None, lambda d, p: (2, d.rank_ffn, d.hidden), "gate projection, then up projection", True
    ),
    BufferSpec(_B.B_GATE_UP, _W, _F, lambda d, p: (2, d.rank_ffn), "bias of W_GATE_UP", True),
    BufferSpec(_B.W_DOWN, _W, None, lambda d, p: (d.hidden, d.rank_ffn), "down projection", True),
    BufferSpec(_B.B_DOWN, _W, _F, lambda d, p: (d.hidden,), "bias of W_DOWN", True),
    BufferSpec(_B.FINAL_NORM, _W, _F, lambda d, p: (d.hidden,), "RMS norm scales before the LM head"),
    BufferSpec(
        _B.LM_HEAD, _W, None, lambda d, p: (d.rank_vocab, d.hidden), "LM head; the rows of EMBED if embeddings are tied"
    ),
    # -- activations
    BufferSpec(_B.ROPE, _A, _F, lambda d, p: (d.tokens, d.head_dim), "cos and sin of each RoPE pair, interleaved"),
    BufferSpec(_B.X, _A, _F, lambda d, p: (d.tokens, d.hidden), "residual stream"),
    BufferSpec(_B.H, _A, None, lambda d, p: (d.tokens, d.hidden), "normalised residual"),
    BufferSpec(_B.Q, _A, None, lambda d, p: (d.tokens, d.q_cols), "rotated queries"),
    BufferSpec(_B.ATTN, _A, None, lambda d, p: (d.tokens, d.o_cols), "attention output, one head after another"),
    BufferSpec(_B.ACT, _A, None, lambda d, p: (d.tokens, d.rank_ffn), "silu(gate) * up"),
    BufferSpec(_B.Y, _A, None, lambda d, p: (d.logit_rows, d.hidden), "rows that get logits, after the final norm"),
    BufferSpec(_B.LOGITS, _O, _F, lambda d, p: (d.logit_rows, d.vocab), "raw logits"),
    BufferSpec(
        _B.PARTIALS,
        _A,
        _F,
        lambda d, p: (d.partials, d.group_size, d.head_dim + 2),
        "partial softmax (maximum, sum, output) per query row, KV head and KV block",
    ),
    BufferSpec(
        _B.SPLITS,
        _A,
        _I,
        lambda d, p: (d.items,),
        "number of finished items of each split; the item that finishes last resets the number to 0",
    ),
    # -- state
    BufferSpec(
        _B.K_CACHE,
        _S,
        None,
        lambda d, p: (p, d.rank_kv_heads, d.kv_row, d.kv_page),
        "keys [element][token]; Q8_0 if quantised_kv",
        True,
    ),
    BufferSpec(
        _B.V_CACHE,
        _S,
        None,
        lambda d, p: (p, d.rank_kv_heads, d.kv_page, d.kv_row),
        "values [token][element]; Q8_0 if quantised_kv",
        True,
    ),
    BufferSpec(
        _B.HISTORY, _S, _I, lambda d, p: (d.max_seqs, d.max_context + 1), "token ids of the request in each slot"
    ),
    # -- outputs
    BufferSpec(_B.TOKENS_OUT, _O, _I, lambda d, p: (d.logit_rows,), "sampled (or scored) token ids"),
    BufferSpec(
        _B.LOGPROBS_OUT, _O, _F, lambda d, p: (d.logit_rows,), "log-softmax of raw logits at the token in TOKENS_OUT"
    ),
    # -- between ranks
    BufferSpec(
        _B.REDUCE,
        _A,
        None,
        lambda d, p: (d.tp * d.own_rows if d.tp > 1 else 0, d.hidden),
        "partial sums of a projection: own_rows rows from each rank, in the order of the ranks",
    ),
    BufferSpec(_B.QK_NORM, _W, _F, lambda d, p: (2, d.head_dim), "RMS norm scales of q heads and k heads", True),
)

BUFFERS: dict[Buffer, BufferSpec] = {spec.buffer: spec for spec in _SPECS}
if list(BUFFERS) != list(Buffer):
    raise AssertionError("every Buffer needs exactly one BufferSpec, in order")


def given(buffer: Buffer | None) -> Buffer:
    """Return the buffer that a phase names in a field where its operation needs one."""
    assert buffer is not None
    return buffer


def itemsize(dims: Dims) -> int:
    """Return the bytes of an element in the compute dtype."""
    return Dtype(dims.dtype).itemsize


def kv_bytes(dims: Dims) -> int:
    """Return the number of bytes that K and V of one token and one KV head take in the cache."""
    return 2 * dims.kv_row * BUFFERS[Buffer.K_CACHE].resolve_dtype(dims).itemsize
