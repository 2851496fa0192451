"""Defines what an operation declares, and helper functions for these declarations.

The functions of an operation have short argument names. `p` is a phase, and `d` the sizes as one rank sees them. `c` is
a dict of columns: for each operand, an array with one element per instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import OWN, Access, Columns, Kind
from ..buffers import BUFFERS, Buffer, Space
from ..dims import Dims
from ..dtypes import Dtype
from ..opcodes import Result, Rows
from ..phases import Phase
from ..record import Column

# What a buffer contains: its purpose, its type (None means the compute type) and its shape.
Contents = tuple[Space, Dtype | None, tuple[int, ...]]


class Cut(Enum):
    """How the scheduler divides a phase into instructions.

    NEVER   not at all: these are control instructions, which the scheduler adds where they are needed
    RUNS    into groups of consecutive rows, nearly equal in size, enough for all workers
    ROWS    into single rows
    TILES   into tiles of rows x columns
    SLOTS   into a fixed number of attention instructions; the step table lists the work of each
    PLACES  into column tiles for each expert, or for each of a token's experts (see `Dims.by_expert`)
    """

    NEVER = 0
    RUNS = 1
    ROWS = 2
    TILES = 3
    SLOTS = 4
    PLACES = 5


@dataclass(frozen=True)
class Cost:
    """The work of each instruction, as float64 columns. A multiply-add counts as two FLOPs.

    `memory_bytes` counts weights and embeddings once per step, as if caches were perfect. Activations are assumed to
    stay in caches. Attention counts as zero here, because its work depends on the step table; `attention_cost` gives
    its cost for a context length. Bytes sent to other ranks are not included; `link_bytes` gives them.
    """

    matrix_flops: NDArray[np.float64]
    vector_flops: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]


def work(
    c: Columns,
    *,
    matrix: NDArray[Any] | float = 0.0,
    vector: NDArray[Any] | float = 0.0,
    memory: NDArray[Any] | float = 0.0,
) -> Cost:
    """Return the cost of instructions with operands `c`. Other arguments are columns, or one number for all of `c`."""
    count = len(next(iter(c.values()), ()))
    columns = (np.asarray(v, dtype=np.float64) for v in (matrix, vector, memory))
    return Cost(*(column if column.ndim else np.full(count, column) for column in columns))


@dataclass(frozen=True)
class OperationSpec:
    """What one operation does. `Operation` declares its number, its colour and its operands.

    Functions get a phase p, the operands c of its instructions (one column per operand) and the sizes d.

    `meaning`   a description for readers, in terms of the phase's buffers; r is a row
    `cut`       how the scheduler divides a phase into instructions
    `accesses`  (p, c, d): the buffer regions that the instructions read and write
    `cost`      (p, c, d): the FLOPs and bytes of the instructions
    `buffers`   (p, d): for each field of `Phase` that names a buffer, what this buffer contains. A phase must name all
                of them, except those in OPTIONAL.
    `execute`   (context, *operands): computes an instruction in NumPy, which defines the operation's results
    `rows`      (p): the sets of rows that a phase may compute
    `results`   what may happen to the results of a phase
    `paged`     whether the CUDA interpreter loads operands through shared-memory pages (`for_pages` in
                csrc/cuda/plan.h)
    """

    meaning: str
    cut: Cut
    accesses: Callable[[Phase, Columns, Dims], list[Access]]
    cost: Callable[[Phase, Columns, Dims], Cost]
    buffers: Callable[[Phase, Dims], dict[str, Contents]]
    execute: Callable[..., None]
    rows: Callable[[Phase], tuple[Rows, ...]] = lambda p: (Rows.EVERY, Rows.OWN)
    results: tuple[Result, ...] = (Result.NONE,)
    paged: bool = False


# The fields of `Phase` that name buffers.
FIELDS = ("weights", "inputs", "output", "bias", "norm", "head_norm")
OPTIONAL = {"bias", "norm", "head_norm"}


def control(meaning: str) -> OperationSpec:
    """Declare a control operation, which computes nothing but affects when other instructions run."""
    return OperationSpec(
        meaning,
        Cut.NEVER,
        accesses=lambda p, c, d: [],
        cost=lambda p, c, d: work(c),
        buffers=lambda p, d: {},
        execute=lambda c, *operands: None,
    )


# -- contents of buffers


def contents(buffer: Buffer, d: Dims) -> Contents:
    """Return the purpose, type and shape that a buffer is declared with, on rank `d.rank`."""
    spec = BUFFERS[buffer]
    return spec.space, spec.dtype, spec.shape(d, 0)


def weights(*shape: int) -> Contents:
    return Space.WEIGHT, None, shape


def vector(*shape: int) -> Contents:
    """The contents of a weight buffer that stays in float32, such as norm scales and biases."""
    return Space.WEIGHT, Dtype.F32, shape


def activations(rows: int, cols: int, dtype: Dtype | None = None) -> Contents:
    return Space.ACTIVATION, dtype, (rows, cols)


def logits(d: Dims) -> Contents:
    return Space.OUTPUT, Dtype.F32, (d.bucket.logit_rows, d.model.vocab)


def partial_sums(d: Dims, width: int) -> Contents:
    """The contents of a buffer of partial sums: `width` columns, and `own_rows` rows from each rank. Matmuls store
    them, and REDUCE adds them."""
    return activations(d.split.tp * d.own_rows, width)


def summed_weights(p: Phase, d: Dims) -> Contents:
    """Describe the weight buffer whose products phase `p` adds up, such as the experts' down projections."""
    shape = () if p.weights is None else BUFFERS[p.weights].shape(d, 0)
    return weights(*shape[:-2], weight_rows(p, d), p.inner(d.split))


def weight_rows(p: Phase, d: Dims) -> int:
    """The number of rows of a weight matrix (output columns of the phase); 0 if the weights are a vector."""
    shape = () if p.weights is None else BUFFERS[p.weights].shape(d, 0)
    return (0, 0, *shape)[-2]


# -- regions


def box(
    buffer: Buffer,
    kind: Kind,
    c: Columns,
    cols: tuple[Column | int, Column | int],
    rank: int | Column = OWN,
    share: float = 1.0,
) -> Access:
    """Return an access to columns [begin, end) = `cols` of `buffer`, and to the rows that the operands `c` give."""
    row = c["row"]
    first, end = (np.full_like(row, col) if isinstance(col, int) else col for col in cols)
    return Access(buffer, kind, row, row + c["rows"], first, end, rank=rank, share=share)


def tile(c: Columns) -> tuple[Column, Column]:
    """Return the column range [begin, end) of each instruction's tile."""
    return c["col"], c["col"] + c["cols"]
