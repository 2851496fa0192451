"""The instruction table: the one place that says what each instruction is. Regions and costs of a kind of
instruction are functions of `regions` and `costs`.

Generated from it: `csrc/common/isa.h` and `docs/instructions.md`. Imported from it: names, colours, regions and
costs, wherever they are needed. Adding a row means adding a function of the same name to each backend; one
that lacks it does not compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from . import costs, regions
from .access import Column
from .buffers import Buffer
from .costs import Costs
from .dims import Dims
from .pages import Matmul
from .record import OPERAND_WORD, OPERANDS, Records
from .regions import Accesses


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
    accesses: Accesses
    cost: Costs
    semantics: str
    output: str
    layered: bool = True
    present: Callable[[Dims], bool] = lambda d: True
    matmul: Matmul | None = None

    def columns(self, records: Records) -> dict[str, Column]:
        """Operand columns of records of this opcode."""
        return {name: records[:, OPERAND_WORD + i] for i, name in enumerate(self.operands)}


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
        regions.embed,
        costs.embed,
        "X[r] = EMBED[token(r)]",
        "X: float32",
        layered=False,
    ),
    Instruction(
        "rope",
        2,
        Family.GATHER,
        _ROWS,
        regions.rope,
        costs.rope,
        "ROPE[r] = cos, sin of position(r) * INV_FREQ (product in float32)",
        "ROPE: float32",
        layered=False,
    ),
    Instruction(
        "first_norm",
        3,
        Family.NORM,
        _ROWS,
        regions.norm,
        costs.norm,
        "attn_norm of the first layer, where layers end with the next one's",
        "H: compute dtype, rounded once after the product with the weight",
        layered=False,
        present=lambda d: bool(d.norm_ahead),
    ),
    Instruction(
        "attn_norm",
        4,
        Family.NORM,
        _ROWS,
        regions.norm,
        costs.norm,
        "H[r] = X[r] / sqrt(mean(X[r]^2) + eps) * ATTN_NORM, to every rank where rows have owners",
        "H: compute dtype, rounded once after the product with the weight",
        present=lambda d: not d.norm_ahead,
    ),
    Instruction(
        "qkv_rope",
        5,
        Family.MATMUL,
        _TILE,
        regions.qkv,
        costs.matmul(_QKV),
        "t = H[r] W_QKV^T + B_QKV; q, k columns rotated pairwise by ROPE[r]; q to Q, k and v to their page",
        "Q, K_CACHE, V_CACHE: compute dtype, rounded once after the rotation",
        matmul=_QKV,
    ),
    Instruction(
        "attention",
        6,
        Family.ATTENTION,
        # Groups: the q, k, v of `group_heads` consecutive KV heads share a counter per row block; the wait
        # word names the grid [row block][group], the signal word the grid [row block].
        ("slot", "group_heads", "groups"),
        regions.attention,
        costs.none,
        "for each item of the slot: softmax(Q K^T / sqrt(head_dim)) V over its KV blocks, each block's (m, l, o) "
        "fresh, merged in ascending order; of a split's items the last to arrive merges; signals rows x KV heads. "
        "With a replicated O projection the output goes to the rank that owns the rows, to every rank where all do",
        "ATTN: compute dtype, rounded once after division by l; probabilities and o stay float32",
    ),
    Instruction(
        "o_proj",
        7,
        Family.MATMUL,
        _TILE,
        regions.residual(_O),
        costs.matmul(_O, first_row=lambda d: 0 if d.one_hop else d.rank * d.row_block),
        "X[r] += ATTN[r] W_O^T + B_O; where this rank has all of ATTN[r] and W_O",
        "X: float32, never rounded",
        present=lambda d: d.tp == 1 or bool(d.replicated_o),
        matmul=_O,
    ),
    Instruction(
        "o_partial",
        8,
        Family.MATMUL,
        _TILE,
        regions.partial(_O_PARTIAL),
        costs.matmul(_O_PARTIAL),
        "REDUCE[this rank][r] = ATTN[r] W_O^T over the rank's heads, "
        "at the rank that owns r (at every rank where all do)",
        "REDUCE: compute dtype",
        present=lambda d: d.tp > 1 and not d.replicated_o,
        matmul=_O_PARTIAL,
    ),
    Instruction(
        "o_reduce",
        9,
        Family.REDUCE,
        _TILE,
        regions.reduce(lambda d: d.head_ranks),
        costs.reduce(lambda d: d.head_ranks),
        "X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + B_O, over the ranks that have heads, in float32, in that order",
        "X: float32, never rounded",
        present=lambda d: d.tp > 1 and not d.replicated_o,
    ),
    Instruction(
        "mlp_norm",
        10,
        Family.NORM,
        _ROWS,
        regions.norm,
        costs.norm,
        "H[r] = X[r] / sqrt(mean(X[r]^2) + eps) * MLP_NORM, to every rank where rows have owners",
        "H: compute dtype, rounded once after the product with the weight",
    ),
    Instruction(
        "gate_up_silu",
        11,
        Family.MATMUL,
        _TILE,
        regions.gate_up,
        costs.matmul(_GATE_UP),
        "ACT[r] = silu(H[r] W_GATE^T + B_GATE) * (H[r] W_UP^T + B_UP)",
        "ACT: compute dtype, rounded once after the product",
        matmul=_GATE_UP,
    ),
    Instruction(
        "down_proj",
        12,
        Family.MATMUL,
        _TILE,
        regions.residual(_DOWN),
        costs.matmul(_DOWN),
        "X[r] += ACT[r] W_DOWN^T + B_DOWN; on one rank",
        "X: float32, never rounded",
        present=lambda d: d.tp == 1,
        matmul=_DOWN,
    ),
    Instruction(
        "down_partial",
        13,
        Family.MATMUL,
        _TILE,
        regions.partial(_DOWN_PARTIAL),
        costs.matmul(_DOWN_PARTIAL),
        "REDUCE[this rank][r] = ACT[r] W_DOWN^T over the rank's FFN columns, "
        "at the rank that owns r (or at every rank)",
        "REDUCE: compute dtype",
        present=lambda d: d.tp > 1,
        matmul=_DOWN_PARTIAL,
    ),
    Instruction(
        "down_reduce",
        14,
        Family.REDUCE,
        _TILE,
        regions.reduce(lambda d: d.ffn_ranks),
        costs.reduce(lambda d: d.ffn_ranks),
        "X[r] += (REDUCE[0][r] + REDUCE[1][r] + ..) + B_DOWN, over the ranks that have FFN columns, as o_reduce",
        "X: float32, never rounded",
        present=lambda d: d.tp > 1,
    ),
    Instruction(
        "next_norm",
        15,
        Family.NORM,
        _ROWS,
        regions.norm,
        costs.norm,
        "attn_norm of the next layer; in the last one, whose result nobody reads, with its own weights",
        "H: compute dtype, rounded once after the product with the weight",
        present=lambda d: bool(d.norm_ahead),
    ),
    Instruction(
        "final_norm",
        16,
        Family.NORM,
        _ROWS,
        regions.final_norm,
        costs.norm,
        "Y[i] = norm of X[logit_rows[i]] with FINAL_NORM; padding rows give zeros. Where token rows have "
        "owners, only of rows that this rank owns (rank 0 the padding), to every rank. Waits for each such row's block",
        "Y: compute dtype, rounded once after the product with the weight",
        layered=False,
    ),
    Instruction(
        "lm_head",
        17,
        Family.MATMUL,
        _TILE,
        regions.lm_head,
        costs.matmul(_LM_HEAD),
        "LOGITS[i] = Y[i] LM_HEAD^T, over the rank's part of the vocabulary, at the rank that samples row i",
        "LOGITS: float32",
        layered=False,
        matmul=_LM_HEAD,
    ),
    Instruction(
        "sample",
        18,
        Family.SAMPLING,
        _ROWS,
        regions.sample,
        costs.sample,
        "penalties, bias, temperature, min-p, top-k, top-p, then one draw keyed (seed, choice, position), ties by "
        "id; or the target token. The token goes to HISTORY on every rank and to TOKENS_OUT on rank 0, its raw "
        "log-softmax to LOGPROBS_OUT on rank 0",
        "TOKENS_OUT: int32; LOGPROBS_OUT: float32",
        layered=False,
    ),
    Instruction(
        "join",
        19,
        Family.CONTROL,
        (),
        regions.none,
        costs.none,
        "nothing: turns waits into a counter, where one record holds too few or ranks meet at the end of a launch",
        "none",
    ),
    Instruction(
        "drain",
        20,
        Family.CONTROL,
        ("queue", "end"),
        regions.none,
        costs.none,
        "claims the next instruction of the rank's queue and runs it (its waits, work and signals), again and again, "
        "until the first `end` of this layer's queue are claimed by any worker",
        "none",
    ),
)

BY_NAME: dict[str, Instruction] = {i.name: i for i in INSTRUCTIONS}
BY_OPCODE: dict[int, Instruction] = {i.opcode: i for i in INSTRUCTIONS}
if len(BY_OPCODE) != len(INSTRUCTIONS) or any(len(i.operands) > OPERANDS for i in INSTRUCTIONS):
    raise AssertionError("opcodes must be unique and operands must fit the record")
