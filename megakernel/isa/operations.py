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
    """A family is a kind of operation. Its value is its colour in every view, from the Okabe-Ito
    palette, which colour-blind people can tell apart.
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
        "no work: turns its waits into a signal, if a record has too few waits or ranks meet at the end of a launch",
    ),
    Operation.DRAIN: OperationSpec(
        OperationFamily.CONTROL,
        "Drain",
        ("queue", "end"),
        "repeatedly claims the next instruction of the rank's queue and runs it (its waits, work and signals), until "
        "workers have claimed the first `end` instructions of this layer's queue",
    ),
    Operation.GATHER: OperationSpec(OperationFamily.GATHER, *_RUN, "output[r] = weights[token(r)]"),
    Operation.ROPE: OperationSpec(
        OperationFamily.GATHER, *_RUN, "output[r] = cos, sin of position(r) * weights (product in float32)"
    ),
    Operation.NORM: OperationSpec(
        OperationFamily.NORM,
        *_RUN,
        "output[r] = inputs[r] / sqrt(mean(inputs[r]^2) + eps) * weights, rounded once and stored at every rank if "
        "rows have owners. For logit rows: output[i] = norm of inputs[logit_rows[i]], for the rows that this rank "
        "owns; rank 0 stores zeros for padding rows",
    ),
    Operation.MATMUL: OperationSpec(
        OperationFamily.MATMUL,
        *_TILE,
        "t = inputs[r] weights^T + bias; if the phase has a norm, the inputs are normalised first. The phase's result "
        "says what happens to t",
    ),
    # The q, k and v of `group_heads` consecutive KV heads form a group. In each row block, a group
    # has one counter. The wait word names this grid of counters, [row block][group]. The signal
    # word names the grid [row block].
    Operation.ATTENTION: OperationSpec(
        OperationFamily.ATTENTION,
        "Attention",
        ("slot", "group_heads", "groups"),
        "for each item of the slot: softmax(Q K^T / sqrt(head_dim)) V over its KV blocks. Each block's (m, l, o) is "
        "computed by itself, and blocks are merged in ascending order; in a split, the item that arrives last merges. "
        "Signals add rows x KV heads. With a replicated O projection the output goes to the rank that owns the rows, "
        "or to every rank if all own them",
    ),
    Operation.REDUCE: OperationSpec(
        OperationFamily.REDUCE,
        *_TILE,
        "output[r] += (inputs[0][r] + inputs[1][r] + ..) + bias, over the ranks that have a part of `weights`, summed "
        "in float32 and in rank order",
    ),
    Operation.SAMPLE: OperationSpec(
        OperationFamily.SAMPLING,
        *_RUN,
        "penalties, bias, mask, temperature, min-p, top-k, top-p, then one draw keyed by (seed, choice, position), "
        "where ids break ties; or the target token. The token goes to HISTORY on every rank and to TOKENS_OUT "
        "on rank 0, its raw "
        "log-softmax to LOGPROBS_OUT on rank 0",
    ),
}

RESULTS: dict[Result, str] = {
    Result.HEADS: "q and k columns rotated pairwise by ROPE[r]; q to Q, k and v to their page; rounded once",
    Result.RESIDUAL: "output[r] += t, in float32",
    Result.PARTIAL: "output[this rank][r] = t at the rank that keeps the residual of r (at every rank if all keep it)",
    Result.GATED: "output[r] = silu(t of the first matrix) * (t of the second), rounded once",
    Result.LOGITS: "output[i] = t, over the rank's part of the vocabulary, at the rank that samples row i; float32",
}
