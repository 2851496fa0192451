"""The numbers by which programs and interpreters name operations, rows and results of matmuls.

Each phase of a model is an operation with parameters (`phases.py`). What an operation does is declared in its own file
in `operations/`. `csrc/common/isa.h` is generated from these declarations. A new operation, result or set of rows needs
a case in every backend; a backend without this case does not compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class OperationFamily(Enum):
    """A kind of operation, with its colour in every chart, from the Okabe-Ito palette for colour-blind people."""

    GATHER = "#999999"
    NORM = "#F0E442"
    MATMUL = "#0072B2"
    ATTENTION = "#D55E00"
    REDUCE = "#009E73"
    SAMPLING = "#CC79A7"
    CONTROL = "#000000"


@dataclass(frozen=True)
class Layout:
    """The operands of a record, in order. `name` is the name of the C++ struct through which C++ reads them."""

    name: str
    operands: tuple[str, ...] = ()


RUN = Layout("Run", ("row", "rows"))
TILE = Layout("Tile", ("row", "rows", "col", "cols"))


class Operation(IntEnum):
    """An operation: its number in program files, its colour in charts, and the operands of its records.

    `operations/` has one file for each member, with the same name in lower case.
    """

    JOIN = 1, OperationFamily.CONTROL, Layout("Join")
    DRAIN = 2, OperationFamily.CONTROL, Layout("Drain", ("queue", "end"))
    GATHER = 3, OperationFamily.GATHER, RUN
    ROPE = 4, OperationFamily.GATHER, RUN
    NORM = 5, OperationFamily.NORM, RUN
    MATMUL = 6, OperationFamily.MATMUL, TILE
    ATTENTION = 7, OperationFamily.ATTENTION, Layout("Attention", ("slot", "group_heads", "groups"))
    REDUCE = 8, OperationFamily.REDUCE, TILE
    SAMPLE = 9, OperationFamily.SAMPLING, RUN
    ROUTE = 10, OperationFamily.MATMUL, RUN
    EXPERTS = 11, OperationFamily.MATMUL, Layout("ExpertTile", ("row", "rows", "col", "cols", "place"))
    COMBINE = 12, OperationFamily.REDUCE, RUN

    family: OperationFamily
    layout: Layout

    def __new__(cls, number: int, family: OperationFamily, layout: Layout) -> Operation:
        made = int.__new__(cls, number)
        made._value_, made.family, made.layout = number, family, layout
        return made


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
    """What a matmul does with its results, after it has added the bias. COMBINE adds its sums likewise. A REDUCE may
    have STORED, and a NORM RESIDUAL or HEADS.

    NONE      no matmul, or one of EXPERTS that stores its products as they are
    HEADS     RoPE rotates q and k; q is stored in Q, k and v at their place in the KV cache
    RESIDUAL  added to the residual stream
    PARTIAL   stored at the rank that keeps the row's residual, as one term of a sum over ranks
    GATED     silu(first matrix) * second matrix; GELU_GATED has GELU, approximated by tanh, in place of silu
    LOGITS    stored at the rank that samples the row
    STORED    stored in float32, for a norm that follows
    """

    NONE = 0
    HEADS = 1
    RESIDUAL = 2
    PARTIAL = 3
    GATED = 4
    LOGITS = 5
    STORED = 6
    GELU_GATED = 7
