"""What an operation declares, and the parts that the declarations of several operations share.

The functions of an operation are given a phase `p`, a rank's sizes `d`, and `c`: the operands of some instructions, as
columns with one element per instruction.
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

# A buffer's space, type (None: the compute type) and shape.
Contents = tuple[Space, Dtype | None, tuple[int, ...]]


class Cut(Enum):
    """How the scheduler divides a phase into instructions.

    NEVER  not at all; it adds control instructions where they are needed
    RUNS   into runs of whole rows, of nearly equal length, enough for all workers
    ROWS   into single rows
    TILES  into tiles of rows x columns
    SLOTS  into the attention slots of the step table
    PLACES  into tiles of columns of each place where rows have results of experts
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

    `memory_bytes` counts the bytes of weights, KV cache and embeddings that must be read from main
    memory once per step, even with perfect caches. It assumes that activations stay in caches.
    Attention's cost depends on the step table and is zero here; `attention_cost` gives it for a
    context length. Bytes sent to other ranks follow from the accesses (`link_bytes`).
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
    """Return the cost of instructions with the operands `c`. A number counts for each of them."""
    shape = np.shape(next(iter(c.values()), ()))
    return Cost(*(np.broadcast_to(np.asarray(v, dtype=np.float64), shape) for v in (matrix, vector, memory)))


@dataclass(frozen=True)
class OperationSpec:
    """What one operation does, besides the facts in `Operation`.

    `meaning`   for people, in terms of the phase's buffers; r is a row
    `cut`       how the scheduler divides a phase
    `accesses`  (p, c, d): the regions of buffers that the instructions read and write
    `cost`      (p, c, d): the work of the instructions
    `buffers`   (p, d): the contents of each buffer that a phase may name, by field of `Phase`. It must name them all,
                except those in OPTIONAL.
    `execute`   (context, *operands): what an instruction computes, in NumPy. It defines the results of the operation.
    `rows`      (p): the rows that a phase may have
    `results`   what a phase may do with its results
    `paged`     whether the CUDA interpreter passes operands through shared-memory pages (`for_pages` in
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


FIELDS = ("weights", "inputs", "output", "bias", "norm", "head_norm")  # of `Phase`, that name buffers
OPTIONAL = {"bias", "norm", "head_norm"}


def control(meaning: str) -> OperationSpec:
    """Declare an operation that computes nothing."""
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
    """Return what a buffer has on the rank `d.rank`."""
    spec = BUFFERS[buffer]
    return spec.space, spec.dtype, spec.shape(d, 0)


def weights(*shape: int) -> Contents:
    return Space.WEIGHT, None, shape


def vector(*shape: int) -> Contents:
    """Weights that stay in float32: scales and biases."""
    return Space.WEIGHT, Dtype.F32, shape


def activations(rows: int, cols: int, dtype: Dtype | None = None) -> Contents:
    return Space.ACTIVATION, dtype, (rows, cols)


def logits(d: Dims) -> Contents:
    return Space.OUTPUT, Dtype.F32, (d.bucket.logit_rows, d.model.vocab)


def partial_sums(d: Dims, width: int) -> Contents:
    """The sums of all ranks that MATMUL stores with the result PARTIAL, and REDUCE adds."""
    return activations(d.split.tp * d.own_rows, width)


def summed_weights(p: Phase, d: Dims) -> Contents:
    """The weights of a phase that adds products made with them, such as those of all experts."""
    shape = () if p.weights is None else BUFFERS[p.weights].shape(d, 0)
    return weights(*shape[:-2], weight_rows(p, d), p.inner(d.split))


def weight_rows(p: Phase, d: Dims) -> int:
    """Return the rows of each weight matrix, which are output columns of the phase; 0 if the weights are a vector."""
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
    """Return an access to the columns `cols` of `buffer`, and to the rows that the operands `row` and `rows` give."""
    row = c["row"]
    first, end = (np.full_like(row, col) if isinstance(col, int) else col for col in cols)
    return Access(buffer, kind, row, row + c["rows"], first, end, rank=rank, share=share)


def tile(c: Columns) -> tuple[Column, Column]:
    """Return the first column of each tile, and the end of its columns."""
    return c["col"], c["col"] + c["cols"]
