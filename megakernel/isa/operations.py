"""The operations that interpreters know. Each phase of a model is an operation with parameters
(`phases.py`).

`csrc/common/isa.h` and `docs/instructions.md` are generated from these tables. A new operation, result or set of rows
needs a case in every backend; a backend without this case does not compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Operation(IntEnum):
    JOIN = 1
    DRAIN = 2
    GATHER = 3
    ROPE = 4
    NORM = 5
    MATMUL = 6
    ATTENTION = 7
    REDUCE = 8
    SAMPLE = 9


class OperationFamily(Enum):
    """A family is a kind of operation. Its value is the colour of these operations in every chart.
    The colours are from the Okabe-Ito palette, which colour-blind people can tell apart.
    """

    GATHER = "#999999"
    NORM = "#F0E442"
    MATMUL = "#0072B2"
    ATTENTION = "#D55E00"
    REDUCE = "#009E73"
    SAMPLING = "#CC79A7"
    CONTROL = "#000000"


class Rows(IntEnum):
    """The rows that a rank computes in a phase.

    EVERY    all token rows
    OWN      the token rows of the row blocks that the rank owns; all rows if every rank keeps the residual
    LOGIT    all rows that get logits
    SAMPLED  the logit rows that the rank samples
    """

    EVERY = 0
    OWN = 1
    LOGIT = 2
    SAMPLED = 3


class Result(IntEnum):
    """What a matmul does with its results, after it has added the bias.

    NONE      not a matmul
    HEADS     RoPE rotates q and k; q is stored in Q, k and v at their place in the KV cache
    RESIDUAL  added to the residual stream
    PARTIAL   stored at the rank that keeps the row's residual, as one term of a sum over ranks
    GATED     silu(first matrix) * second matrix
    LOGITS    stored at the rank that samples the row
    """

    NONE = 0
    HEADS = 1
    RESIDUAL = 2
    PARTIAL = 3
    GATED = 4
    LOGITS = 5


@dataclass(frozen=True)
class OperationSpec:
    """The properties of an operation. `operands` names the operands of its records, in order.
    `layout` is the name of the C++ struct through which C++ reads them.
    """

    family: OperationFamily
    layout: str
    operands: tuple[str, ...]
    meaning: str


_RUN = "Run", ("row", "rows")
_TILE = "Tile", ("row", "rows", "col", "cols")

OPERATIONS: dict[Operation, OperationSpec] = {
    Operation.JOIN: OperationSpec(
        OperationFamily.CONTROL,
        "Join",
        (),
        "computes nothing: waits, then signals; used where an instruction needs more than eight waits, and to "
        "synchronise ranks at the end of a launch",
    ),
    Operation.DRAIN: OperationSpec(
        OperationFamily.CONTROL,
        "Drain",
        ("queue", "end"),
        "repeatedly claims the next instruction of the rank's queue and runs it (its waits, work and signals), until "
        "workers have claimed the queue's first `end` instructions in this layer",
    ),
    Operation.GATHER: OperationSpec(OperationFamily.GATHER, *_RUN, "output[r] = weights[token id of row r]"),
    Operation.ROPE: OperationSpec(
        OperationFamily.GATHER,
        *_RUN,
        "output[r] = cos(a) and sin(a) interleaved, where a = (position of row r) * weights, in float32",
    ),
    Operation.NORM: OperationSpec(
        OperationFamily.NORM,
        *_RUN,
        "output[r] = inputs[r] / sqrt(mean(inputs[r]^2) + eps) * weights, rounded once. If only one rank keeps a row's "
        "residual, that rank computes the norm and stores it at every rank. For logit row i: output[i] = norm of "
        "inputs[logit_rows[i]], or zeros for padding",
    ),
    Operation.MATMUL: OperationSpec(
        OperationFamily.MATMUL,
        *_TILE,
        "t = inputs[r] weights^T + bias; if the phase has a norm, the inputs are normalised first. The `result` of the "
        "phase (next table) determines where t is stored",
    ),
    # The q, k and v of `group_heads` consecutive KV heads form a group. Each row block has one counter per
    # group, and the wait word names the first counter of this grid [row block][group]. The signal word
    # names the first of another array of counters, which has one counter per row block.
    Operation.ATTENTION: OperationSpec(
        OperationFamily.ATTENTION,
        "Attention",
        ("slot", "group_heads", "groups"),
        "for each attention item of the slot: softmax(Q K^T / sqrt(head_dim)) V over the item's KV blocks. Each block "
        "gives a maximum score m, a sum l of exponentials and an unnormalised output o, which are merged in ascending "
        "block order. If several items divide the blocks, the last to finish merges. An item's signal adds rows x KV "
        "heads. If every rank has all of W_O, the output is stored at each rank that keeps the row's residual",
    ),
    Operation.REDUCE: OperationSpec(
        OperationFamily.REDUCE,
        *_TILE,
        "output[r] += (inputs[0][r] + inputs[1][r] + ..) + bias, in float32 and in rank order; inputs[k] is rank k's "
        "partial sum, for all ranks that have a part of `weights`",
    ),
    Operation.SAMPLE: OperationSpec(
        OperationFamily.SAMPLING,
        *_RUN,
        "takes the row's target token, if any. Otherwise applies penalties, bias, mask, temperature, min-p, top-k and "
        "top-p, then samples with a random number from (seed, choice, position); of equal logits, the lower token id "
        "ranks first. Writes the token to HISTORY on every rank and to TOKENS_OUT on rank 0, and its raw "
        "log-softmax to LOGPROBS_OUT on rank 0",
    ),
}

RESULTS: dict[Result, str] = {
    Result.HEADS: "rotates pairs of q and k columns by ROPE[r]; stores q in Q, and k and v in a KV page, rounded once",
    Result.RESIDUAL: "output[r] += t, in float32",
    Result.PARTIAL: "output[this rank][r] = t, stored at each rank that keeps row r's residual",
    Result.GATED: "output[r] = silu(t of the first matrix) * (t of the second), rounded once",
    Result.LOGITS: "output[i] = t in float32, for this rank's part of the vocabulary, at the rank that samples row i",
}
