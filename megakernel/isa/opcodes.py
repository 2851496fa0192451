"""Assigns numbers to operations, to the sets of rows that phases compute, and to the uses of matmul results.

A phase, such as the QKV projection, is an operation with parameters (`phases.py`). `operations/` has one file per
operation. `csrc/common/isa.h` is generated from these declarations. Each new number needs a case in every backend; a
backend without this case does not compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class OperationFamily(Enum):
    """Groups of operations that have one colour in every chart. The palette (Okabe-Ito) suits colour-blind people."""

    GATHER = "#999999"
    NORM = "#F0E442"
    MATMUL = "#0072B2"
    ATTENTION = "#D55E00"
    REDUCE = "#009E73"
    SAMPLING = "#CC79A7"
    CONTROL = "#000000"


@dataclass(frozen=True)
class Layout:
    """The operands of an instruction, in order. `name` is the name of the C++ struct that has these fields."""

    name: str
    operands: tuple[str, ...] = ()


RUN = Layout("Run", ("row", "rows"))
TILE = Layout("Tile", ("row", "rows", "col", "cols"))


class Operation(IntEnum):
    """An operation, such as MATMUL. Its value is its number in program files. `family` selects its colour in charts,
    and `layout` lists the operands of its instructions.

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
    """The set of rows that a rank computes in a phase.

    EVERY    all token rows
    OWN      the token rows whose residual the rank keeps; all rows if every rank keeps the whole residual
    LOGIT    all rows for which logits are computed
    SAMPLED  the logit rows whose tokens the rank samples
    """

    EVERY = 0
    OWN = 1
    LOGIT = 2
    SAMPLED = 3


class Result(IntEnum):
    """What happens to the results of a matmul after its bias has been added: RESULTS in operations/matmul.py describes
    it. NONE means no matmul, or a matmul of EXPERTS that stores its products as they are. Some other operations have a
    Result too. COMBINE (the sum over a token's experts) may have RESIDUAL or PARTIAL, REDUCE may have STORED, and NORM
    may have RESIDUAL or HEADS."""

    NONE = 0
    HEADS = 1
    RESIDUAL = 2
    PARTIAL = 3
    GATED = 4
    LOGITS = 5
    STORED = 6
    GELU_GATED = 7
