"""The instruction table: the one place that says what each instruction is.

Generated from it: `csrc/common/isa.h` and `docs/instructions.md`. Imported from it: names, colours, regions and
costs, wherever they are needed. Adding a row means adding a function of the same name to each backend; one
that lacks it does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import EVERY, OWN, Access, Column, Index, Kind, item_columns
from .buffers import Buffer
from .dims import Dims
from .dtypes import Dtype
from .pages import Matmul
from .record import OPERAND_WORD, OPERANDS, Records

Columns = Mapping[str, Column]


class Family(Enum):
    """Instructions of one kind, with the colour they have in every view (Okabe-Ito, readable by the colour-blind)."""

    GATHER = "#999999"
    NORM = "#F0E442"
    MATMUL = "#0072B2"
    ATTENTION = "#D55E00"
    REDUCE = "#009E73"
    SAMPLING = "#CC79A7"
    CONTROL = "#000000"


@dataclass(frozen=True)
class Cost:
    """Work of each instruction, as float64 columns. FLOPs count a multiply-add as two.

    `memory_bytes` are the bytes that must come from or go to main memory once per step even with perfect
    caches: weights and KV. Activations stay in caches. Attention's cost depends on the step table and is zero
    here; `attention_cost` gives it for a context length. What goes to other ranks follows from the accesses:
    `link_bytes`.
    """

    matrix_flops: NDArray[np.float64]
    vector_flops: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


@dataclass(frozen=True)
class Instruction:
    """One row of the table.

    `accesses(columns, dims)` gives the regions of instructions of rank `dims.rank` whose operand columns are
    `columns`; `cost(columns, dims)` their work. `present(dims)`: whether programs of these sizes have it at all.
    `layered`: lies in the layer body. `output` names the storage type and the rounding point of what it writes.
    `matmul` says what a matmul multiplies, from which the pages follow that it takes; but for attention nothing else
    takes any.
    """

    name: str
    opcode: int
    family: Family
    operands: tuple[str, ...]
    accesses: Callable[[Columns, Dims], list[Access]]
    cost: Callable[[Columns, Dims], Cost]
    semantics: str
    output: str
    layered: bool = True
    present: Callable[[Dims], bool] = lambda d: True
    matmul: Matmul | None = None

    def columns(self, records: Records) -> dict[str, Column]:
        """Operand columns of records of this opcode."""
        return {name: records[:, OPERAND_WORD + i] for i, name in enumerate(self.operands)}


def itemsize(dims: Dims) -> int:
    """Bytes of an element in the compute dtype."""
    return Dtype(dims.dtype).itemsize


def _box(
    buffer: Buffer, kind: Kind, c: Columns, cols: tuple[Column | int, Column | int], rank: int | Column = OWN
) -> Access:
    """Rows from the `row` and `rows` operands."""
    row = c["row"]
    return Access(buffer, kind, row, row + c["rows"], _full(cols[0], row), _full(cols[1], row), rank=rank)


def _peers(d: Dims) -> int:
    """Where a row goes that every rank needs: to all copies, or only to the own where all ranks compute it."""
    return OWN if d.one_hop or d.tp == 1 else EVERY


def _owner(c: Columns, d: Dims) -> int | Column:
    """Whose copy of the residual has the rows of instructions that lie in one row block each."""
    return EVERY if d.one_hop else c["row"] // d.row_block % d.tp


def _reduce_row(c: Columns, d: Dims) -> Column:
    """First row of instructions' rows in a slot of the owner's REDUCE."""
    if d.one_hop:
        return c["row"]
    return c["row"] // d.row_block // d.tp * d.row_block + c["row"] % d.row_block


def _full(value: Column | int, like: Column) -> Column:
    return np.full_like(like, value) if isinstance(value, int) else value


def _tile(c: Columns) -> tuple[Column, Column]:
    return c["col"], c["col"] + c["cols"]


def _overlap(c: Columns, start: int, width: int) -> tuple[Column, Column]:
    """The part of each column tile inside [start, start + width), relative to start; empty where disjoint."""
    col, end = _tile(c)
    low = np.clip(col - start, 0, width)
    return low, np.maximum(np.clip(end - start, 0, width), low)


def _cost(
    like: Column,
    matrix: NDArray[Any] | float = 0.0,
    vector: NDArray[Any] | float = 0.0,
    memory: NDArray[Any] | float = 0.0,
) -> Cost:
    def col(v: NDArray[Any] | float) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(v, dtype=np.float64), like.shape)

    return Cost(col(matrix), col(vector), col(memory))


def _matmul_cost(m: Matmul, first_row: Callable[[Dims], int] = lambda d: 0) -> Callable[[Columns, Dims], Cost]:
    """A tile of rows x cols outputs.

    `first_row` is the rank's first row: its tiles bring the weights, the others find them in a cache.
    """

    def cost(c: Columns, d: Dims) -> Cost:
        weights = c["cols"].astype(np.float64) * m.width * m.length(d)
        return _cost(
            c["row"],
            matrix=2.0 * c["rows"] * weights,
            memory=np.where(c["row"] == first_row(d), weights * itemsize(d), 0.0),
        )

    return cost


def attention_cost(dims: Dims, row_kv_heads: int, kv_tokens: float) -> tuple[float, float]:
    """(FLOPs, KV bytes) of one item: `row_kv_heads` = query rows x KV heads, each over `kv_tokens` tokens.

    FLOPs = 4 x query heads x head_dim x tokens (roofline: 2nP + 4nSLHh). KV bytes count each row's read once.
    """
    flops = 4.0 * row_kv_heads * dims.group_size * dims.head_dim * kv_tokens
    return flops, 2.0 * row_kv_heads * dims.head_dim * kv_tokens * itemsize(dims)


def _embed_accesses(c: Columns, d: Dims) -> list[Access]:
    return [_box(Buffer.X, Kind.WRITE, c, (0, d.hidden))]


def _rope_accesses(c: Columns, d: Dims) -> list[Access]:
    return [_box(Buffer.ROPE, Kind.WRITE, c, (0, d.head_dim))]


def _norm_accesses(c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.X, Kind.READ, c, (0, d.hidden)),
        _box(Buffer.H, Kind.WRITE, c, (0, d.hidden), _peers(d)),
    ]


def _qkv_accesses(c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.H, Kind.READ, c, (0, d.hidden)),
        _box(Buffer.ROPE, Kind.READ, c, (0, d.head_dim)),
        _box(Buffer.Q, Kind.WRITE, c, _overlap(c, 0, d.q_cols)),
        _box(Buffer.K_CACHE, Kind.WRITE, c, _overlap(c, d.q_cols, d.kv_cols)),
        _box(Buffer.V_CACHE, Kind.WRITE, c, _overlap(c, d.q_cols + d.kv_cols, d.kv_cols)),
    ]


def _attention_accesses(c: Columns, d: Dims) -> list[Access]:
    zero = np.zeros_like(c["slot"])
    out: int | None = OWN
    if d.replicated_o and d.tp > 1:
        out = EVERY if d.one_hop else None

    def rows(buffer: Buffer, kind: Kind, rank: int | None = OWN) -> Access:
        first, end = item_columns(buffer, d, 0, d.rank_kv_heads)
        return Access(buffer, kind, zero, zero + d.tokens, zero + first, zero + end, Index.ITEM, rank)

    return [
        rows(Buffer.Q, Kind.READ),
        rows(Buffer.K_CACHE, Kind.READ),
        rows(Buffer.V_CACHE, Kind.READ),
        rows(Buffer.ATTN, Kind.WRITE, out),
    ]


def _residual_accesses(m: Matmul) -> Callable[[Columns, Dims], list[Access]]:
    def accesses(c: Columns, d: Dims) -> list[Access]:
        return [_box(m.inputs, Kind.READ, c, (0, m.length(d))), _box(Buffer.X, Kind.UPDATE, c, _tile(c))]

    return accesses


def _partial_accesses(m: Matmul) -> Callable[[Columns, Dims], list[Access]]:
    def accesses(c: Columns, d: Dims) -> list[Access]:
        row = d.rank * d.own_rows + _reduce_row(c, d)
        col, col_end = _tile(c)
        store = Access(Buffer.REDUCE, Kind.WRITE, row, row + c["rows"], col, col_end, rank=_owner(c, d))
        return [_box(m.inputs, Kind.READ, c, (0, m.length(d))), store]

    return accesses


def _reduce_accesses(ranks: Callable[[Dims], int]) -> Callable[[Columns, Dims], list[Access]]:
    def accesses(c: Columns, d: Dims) -> list[Access]:
        col, col_end = _tile(c)
        rows = [k * d.own_rows + _reduce_row(c, d) for k in range(ranks(d))]
        slots = [Access(Buffer.REDUCE, Kind.READ, row, row + c["rows"], col, col_end) for row in rows]
        return [*slots, _box(Buffer.X, Kind.UPDATE, c, (col, col_end))]

    return accesses


def _gate_up_accesses(c: Columns, d: Dims) -> list[Access]:
    return [_box(Buffer.H, Kind.READ, c, (0, d.hidden)), _box(Buffer.ACT, Kind.WRITE, c, _tile(c))]


def _final_norm_accesses(c: Columns, d: Dims) -> list[Access]:
    zero = np.zeros_like(c["row"])
    every = Access(Buffer.X, Kind.READ, zero, zero + d.tokens, zero, zero + d.hidden, Index.LOGIT_ROW)
    rank = _peers(d)
    index = Index.NONE if rank == OWN else Index.LOGIT_OWNER
    row = c["row"]
    return [every, Access(Buffer.Y, Kind.WRITE, row, row + c["rows"], zero, zero + d.hidden, index, rank)]


def _lm_head_accesses(c: Columns, d: Dims) -> list[Access]:
    """Each row goes to the rank that samples it."""
    col, col_end = (d.first_vocab + edge for edge in _tile(c))
    out = [_box(Buffer.Y, Kind.READ, c, (0, d.hidden))]
    for rank in range(d.tp):
        first = np.maximum(c["row"], rank * d.own_logit_rows)
        end = np.minimum(c["row"] + c["rows"], (rank + 1) * d.own_logit_rows)
        out.append(Access(Buffer.LOGITS, Kind.WRITE, first, np.maximum(first, end), col, col_end, rank=rank))
    return out


def _sample_accesses(c: Columns, d: Dims) -> list[Access]:
    return [
        _box(Buffer.LOGITS, Kind.READ, c, (0, d.vocab)),
        _box(Buffer.TOKENS_OUT, Kind.WRITE, c, (0, 1), 0),
        _box(Buffer.LOGPROBS_OUT, Kind.WRITE, c, (0, 1), 0),
    ]


_QKV = Matmul(Buffer.W_QKV, Buffer.H, "hidden")
_O = Matmul(Buffer.W_O, Buffer.ATTN, "o_cols", output=Buffer.X)
_O_PARTIAL = replace(_O, output=Buffer.REDUCE)
_GATE_UP = Matmul(Buffer.W_GATE_UP, Buffer.H, "hidden", 2, Buffer.ACT)
_DOWN = Matmul(Buffer.W_DOWN, Buffer.ACT, "rank_ffn", output=Buffer.X)
_DOWN_PARTIAL = replace(_DOWN, output=Buffer.REDUCE)
_LM_HEAD = Matmul(Buffer.LM_HEAD, Buffer.Y, "hidden")

_ROWS = ("row", "rows")
_TILE = ("row", "rows", "col", "cols")

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        "embed",
        1,
        Family.GATHER,
        _ROWS,
        _embed_accesses,
        lambda c, d: _cost(c["row"], memory=c["rows"] * d.hidden * float(itemsize(d))),
        "X[r] = EMBED[token(r)]",
        "X: float32",
        layered=False,
    ),
    Instruction(
        "rope",
        2,
        Family.GATHER,
        _ROWS,
        _rope_accesses,
        lambda c, d: _cost(c["row"], vector=2.0 * c["rows"] * d.head_dim),
        "ROPE[r] = cos, sin of position(r) * INV_FREQ (product in float32)",
        "ROPE: float32",
        layered=False,
    ),
    Instruction(
        "attn_norm",
        3,
        Family.NORM,
        _ROWS,
        _norm_accesses,
        lambda c, d: _cost(c["row"], vector=4.0 * c["rows"] * d.hidden),
        "H[r] = X[r] / sqrt(mean(X[r]^2) + eps) * ATTN_NORM, to every rank where rows have owners",
        "H: compute dtype, rounded once after the product with the weight",
    ),
    Instruction(
        "qkv_rope",
        4,
        Family.MATMUL,
        _TILE,
        _qkv_accesses,
        _matmul_cost(_QKV),
        "t = H[r] W_QKV^T + B_QKV; q, k columns rotated pairwise by ROPE[r]; q to Q, k and v to their page",
        "Q, K_CACHE, V_CACHE: compute dtype, rounded once after the rotation",
        matmul=_QKV,
    ),
    Instruction(
        "attention",
        5,
        Family.ATTENTION,
        # Groups: the q, k, v of `group_heads` consecutive KV heads share a counter per row block; the wait
        # word names the grid [row block][group], the signal word the grid [row block].
        ("slot", "group_heads", "groups"),
        _attention_accesses,
        lambda c, d: _cost(c["slot"]),
        "for each item of the slot: softmax(Q K^T / sqrt(head_dim)) V over its KV blocks, each block's (m, l, o) "
        "fresh, merged in ascending order; of a split's items the last to arrive merges; signals rows x KV heads. "
        "With a replicated O projection the output goes to the rank that owns the rows, to every rank where all do",
        "ATTN: compute dtype, rounded once after division by l; probabilities and o stay float32",
    ),
    Instruction(
        "o_proj",
        6,
        Family.MATMUL,
        _TILE,
        _residual_accesses(_O),
        _matmul_cost(_O, first_row=lambda d: 0 if d.one_hop else d.rank * d.row_block),
        "X[r] += ATTN[r] W_O^T + B_O; where this rank has all of ATTN[r] and W_O",
        "X: float32, never rounded",
        present=lambda d: d.tp == 1 or bool(d.replicated_o),
        matmul=_O,
    ),
    Instruction(
        "o_partial",
        7,
        Family.MATMUL,
        _TILE,
        _partial_accesses(_O_PARTIAL),
        _matmul_cost(_O_PARTIAL),
        "REDUCE[this rank][r] = ATTN[r] W_O^T over the rank's heads, "
        "at the rank that owns r (at every rank where all do)",
        "REDUCE: compute dtype",
        present=lambda d: d.tp > 1 and not d.replicated_o,
        matmul=_O_PARTIAL,
    ),
    Instruction(
        "o_reduce",
        8,
        Family.REDUCE,
        _TILE,
        _reduce_accesses(lambda d: d.head_ranks),
        lambda c, d: _cost(c["row"], vector=1.0 * c["rows"] * c["cols"] * d.head_ranks),
        "X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + B_O, over the ranks that have heads, in float32, in that order",
        "X: float32, never rounded",
        present=lambda d: d.tp > 1 and not d.replicated_o,
    ),
    Instruction(
        "mlp_norm",
        9,
        Family.NORM,
        _ROWS,
        _norm_accesses,
        lambda c, d: _cost(c["row"], vector=4.0 * c["rows"] * d.hidden),
        "H[r] = X[r] / sqrt(mean(X[r]^2) + eps) * MLP_NORM, to every rank where rows have owners",
        "H: compute dtype, rounded once after the product with the weight",
    ),
    Instruction(
        "gate_up_silu",
        10,
        Family.MATMUL,
        _TILE,
        _gate_up_accesses,
        _matmul_cost(_GATE_UP),
        "ACT[r] = silu(H[r] W_GATE^T + B_GATE) * (H[r] W_UP^T + B_UP)",
        "ACT: compute dtype, rounded once after the product",
        matmul=_GATE_UP,
    ),
    Instruction(
        "down_proj",
        11,
        Family.MATMUL,
        _TILE,
        _residual_accesses(_DOWN),
        _matmul_cost(_DOWN),
        "X[r] += ACT[r] W_DOWN^T + B_DOWN; on one rank",
        "X: float32, never rounded",
        present=lambda d: d.tp == 1,
        matmul=_DOWN,
    ),
    Instruction(
        "down_partial",
        12,
        Family.MATMUL,
        _TILE,
        _partial_accesses(_DOWN_PARTIAL),
        _matmul_cost(_DOWN_PARTIAL),
        "REDUCE[this rank][r] = ACT[r] W_DOWN^T over the rank's FFN columns, "
        "at the rank that owns r (or at every rank)",
        "REDUCE: compute dtype",
        present=lambda d: d.tp > 1,
        matmul=_DOWN_PARTIAL,
    ),
    Instruction(
        "down_reduce",
        13,
        Family.REDUCE,
        _TILE,
        _reduce_accesses(lambda d: d.ffn_ranks),
        lambda c, d: _cost(c["row"], vector=1.0 * c["rows"] * c["cols"] * d.ffn_ranks),
        "X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + B_DOWN, over the ranks that have FFN columns, as o_reduce",
        "X: float32, never rounded",
        present=lambda d: d.tp > 1,
    ),
    Instruction(
        "final_norm",
        14,
        Family.NORM,
        _ROWS,
        _final_norm_accesses,
        lambda c, d: _cost(c["row"], vector=4.0 * c["rows"] * d.hidden),
        "Y[i] = norm of X[logit_rows[i]] with FINAL_NORM; padding rows give zeros. Where token rows have "
        "owners, only of rows that this rank owns (rank 0 the padding), to every rank. Waits for each such row's block",
        "Y: compute dtype, rounded once after the product with the weight",
        layered=False,
    ),
    Instruction(
        "lm_head",
        15,
        Family.MATMUL,
        _TILE,
        _lm_head_accesses,
        _matmul_cost(_LM_HEAD),
        "LOGITS[i] = Y[i] LM_HEAD^T, over the rank's part of the vocabulary, at the rank that samples row i",
        "LOGITS: float32",
        layered=False,
        matmul=_LM_HEAD,
    ),
    Instruction(
        "sample",
        16,
        Family.SAMPLING,
        _ROWS,
        _sample_accesses,
        lambda c, d: _cost(c["row"], vector=8.0 * c["rows"] * d.vocab),
        "penalties, bias, temperature, min-p, top-k, top-p, then one draw keyed (seed, choice, position), ties by "
        "id; or the target token. The token goes to HISTORY on every rank and to TOKENS_OUT on rank 0, its raw "
        "log-softmax to LOGPROBS_OUT on rank 0",
        "TOKENS_OUT: int32; LOGPROBS_OUT: float32",
        layered=False,
    ),
    Instruction(
        "join",
        17,
        Family.CONTROL,
        (),
        lambda c, d: [],
        lambda c, d: Cost(*(np.zeros(0),) * 3),
        "nothing: turns waits into a counter, where one record holds too few or ranks meet at the end of a launch",
        "none",
    ),
    Instruction(
        "drain",
        18,
        Family.CONTROL,
        ("queue", "end"),
        lambda c, d: [],
        lambda c, d: Cost(*(np.zeros(0),) * 3),
        "claims the next instruction of the rank's queue and runs it (its waits, work and signals), again and again, "
        "until the first `end` of this layer's queue are claimed by any worker",
        "none",
    ),
)

BY_NAME: dict[str, Instruction] = {i.name: i for i in INSTRUCTIONS}
BY_OPCODE: dict[int, Instruction] = {i.opcode: i for i in INSTRUCTIONS}
if len(BY_OPCODE) != len(INSTRUCTIONS) or any(len(i.operands) > OPERANDS for i in INSTRUCTIONS):
    raise AssertionError("opcodes must be unique and operands must fit the record")
