"""Describes a model's forward pass as data: a list of phases in the order in which a step runs them.

A phase is an operation with parameters, such as the QKV projection. Each model family lists its phases
(`megakernel/model/families`). All other code derives what it needs from the parameters: accessed data, costs,
shared-memory pages and dependencies. Instructions contain the phase's number. The phase's name is only for people.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from .buffers import BUFFERS, Buffer
from .dims import Dims, ModelSizes, Split
from .dtypes import Dtype
from .opcodes import Operation, OperationFamily, Result, Rows
from .record import OPERAND_WORD, Column, Records, phase_number

NO_BUFFER = -1
MAX_PHASES = 31  # maximum number of phases of a program, including join and drain


@dataclass(frozen=True)
class Phase:
    """One operation with its parameters. The instructions of a phase differ only in operands, such as rows and columns.

    `weights`      the weights that the operation uses: a matmul's matrices, a norm's scales, a gather's table or
                   attention's sinks; None if there are none. If the operation adds partial sums or outputs of experts:
                   the matrices whose products are added
    `bias`         added to the results; None if the model has none
    `norm`         the scales of an RMS norm that a matmul applies to its inputs first
    `head_norm`    the scales of the RMS norms of each head of q and of k, applied before RoPE
    `ahead`        usually 0; if it is n, layer l uses the weights of layer l + n, or the last layer's if there is none
    `weight_bits`  mean bits per weight in memory; None means the compute type's bits
    `number`       the number of the phase in its forward pass (`Forward`), which instructions contain
    """

    name: str
    operation: Operation
    rows: Rows = Rows.OWN
    weights: Buffer | None = None
    inputs: Buffer | None = None
    output: Buffer | None = None
    result: Result = Result.NONE
    bias: Buffer | None = None
    norm: Buffer | None = None
    head_norm: Buffer | None = None
    ahead: int = 0
    weight_bits: float | None = None
    number: int = 0

    @property
    def family(self) -> OperationFamily:
        return self.operation.family

    @property
    def control(self) -> bool:
        return self.family is OperationFamily.CONTROL

    @property
    def is_matmul(self) -> bool:
        return self.operation is Operation.MATMUL

    @property
    def reads_weights(self) -> bool:
        """Whether the phase reads a weight matrix. REDUCE and COMBINE only add products of other phases."""
        return self.operation in (Operation.MATMUL, Operation.GATHER, Operation.ROUTE, Operation.EXPERTS)

    @property
    def adds_products(self) -> bool:
        """Whether each result is a sum of products of inputs and weights. Ranks may divide the terms of the sum."""
        return self.operation in (Operation.MATMUL, Operation.COMBINE)

    @property
    def operands(self) -> tuple[str, ...]:
        return self.operation.layout.operands

    def columns(self, records: Records) -> dict[str, Column]:
        """Return the operands of this phase's records: for each name, a column with one element per record."""
        return {name: records[:, OPERAND_WORD + i] for i, name in enumerate(self.operands)}

    # -- The methods below return sizes of the part that rank `split.rank` has.

    def inner(self, split: Split) -> int:
        """Return the length of the dot products of a matmul, or of the rows of a norm."""
        unscaled = self.weights is None and self.operation is Operation.NORM
        return split.model.hidden if unscaled else _part(self.weights, split)[-1]

    def width(self, split: Split) -> int:
        """The number of output columns of a matmul or of EXPERTS; 0 if the rank's part of the weights is empty."""
        multiplies = self.is_matmul or self.operation is Operation.EXPERTS
        return _part(self.weights, split)[-2] if multiplies and self.inner(split) else 0

    def matrices(self, split: Split) -> int:
        """The number of matrices of a matmul or of an expert: 2 for gate and up, whose products form one output."""
        shape = _part(self.weights, split)
        return shape[0] if len(shape) == 3 else 1

    def whole_heads(self, model: ModelSizes) -> bool:
        """Whether tiles must contain whole heads. They must if heads are normalised or quantised."""
        return self.result is Result.HEADS and (self.head_norm is not None or model.quantised_kv > 0)

    def stored_bits(self, model: ModelSizes) -> float:
        """Return the mean number of bits per weight in memory."""
        return Dtype(model.dtype).bits if self.weight_bits is None else self.weight_bits

    def ranks(self, split: Split) -> int:
        """Return the number n of ranks that have a part of the weights' inner dimension, so that their sums must be
        added. They are ranks 0 to n - 1."""
        return sum(self.inner(part) > 0 for part in split.ranks)


@lru_cache(maxsize=1024)
def _part(weights: Buffer | None, split: Split) -> tuple[int, ...]:
    """Return the shape of the rank's weights in one layer, for one expert if there are experts."""
    spec = None if weights is None else BUFFERS[weights].weight
    # A faulty program file may name a buffer that has no weights. `check_phases` refuses it later.
    return (0, 0) if spec is None else spec.shape(split)


def _same(name: str) -> Callable[[Phase, Dims], int]:
    return lambda phase, dims: NO_BUFFER if (value := getattr(phase, name)) is None else int(value)


class PhaseField:
    """A field of the C++ struct `Phase`, with its C++ type `kind`. `value` computes the field's value on one rank; by
    default, it is the value of the field with the same name in the Python class `Phase`."""

    def __init__(self, kind: str, name: str, what: str = "", value: Callable[[Phase, Dims], int] | None = None) -> None:
        self.kind, self.name, self.what, self.value = kind, name, what, value or _same(name)


def _reduced_ranks(phase: Phase, dims: Dims) -> int:
    return phase.ranks(dims.split) if phase.operation is Operation.REDUCE else 0


PHASE_FIELDS: tuple[PhaseField, ...] = (
    PhaseField("Operation", "operation"),
    PhaseField("Rows", "rows"),
    PhaseField("Result", "result", "of a matmul"),
    PhaseField("Buffer", "weights"),
    PhaseField("Buffer", "bias", "kNone if the phase adds no bias; likewise for norm and head_norm"),
    PhaseField("Buffer", "norm", "scale of the RMS norm that is applied to the inputs"),
    PhaseField("Buffer", "head_norm", "scales of the RMS norms of q heads and k heads"),
    PhaseField("Buffer", "inputs"),
    PhaseField("Buffer", "output"),
    PhaseField("int32_t", "ahead", "weights are of the layer that is so much later, or of the last"),
    PhaseField("int32_t", "inner", "length of each dot product (K)", lambda p, d: p.inner(d.split)),
    PhaseField("int32_t", "width", "output columns", lambda p, d: p.width(d.split)),
    PhaseField("int32_t", "matrices", "number of weight matrices", lambda p, d: p.matrices(d.split)),
    PhaseField("int32_t", "ranks", "number of ranks whose partial sums a reduction adds", _reduced_ranks),
)

# The control phases. They compute nothing, and every program contains them under these numbers.
JOIN = Phase("join", Operation.JOIN, number=1)
DRAIN = Phase("drain", Operation.DRAIN, number=2)
CONTROL = (JOIN, DRAIN)


@dataclass(frozen=True)
class Forward:
    """A step's phases, numbered in execution order: prologue, body (run once per layer) and epilogue."""

    prologue: tuple[Phase, ...]
    body: tuple[Phase, ...]
    epilogue: tuple[Phase, ...]

    @staticmethod
    def of(*segments: Sequence[Phase]) -> Forward:
        """Number the phases of the prologue, the body and the epilogue."""
        if sum(map(len, segments)) > MAX_PHASES - len(CONTROL):
            raise MegakernelError(f"a forward pass must have at most {MAX_PHASES - len(CONTROL)} phases")
        numbers = itertools.count(1 + len(CONTROL))
        return Forward(*(tuple(replace(p, number=next(numbers)) for p in s) for s in segments))

    @cached_property
    def segments(self) -> tuple[tuple[Phase, ...], ...]:
        return self.prologue, self.body, self.epilogue

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """All phases except the control phases, in order."""
        return (*self.prologue, *self.body, *self.epilogue)

    @cached_property
    def by_number(self) -> dict[int, Phase]:
        """All phases by number, including join and drain."""
        return {phase.number: phase for phase in (*CONTROL, *self.phases)}

    @cached_property
    def by_name(self) -> dict[str, Phase]:
        return {phase.name: phase for phase in self.by_number.values()}

    def of_record(self, record: NDArray[np.int32]) -> Phase:
        return self.by_number[int(phase_number(record))]

    def numbers(self, operation: Operation) -> list[int]:
        """The numbers of the phases with this operation."""
        return [p.number for p in self.by_number.values() if p.operation is operation]

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.phases)

    def words(self, dims: Dims) -> NDArray[np.int32]:
        """Return the contents of the C++ structs `Phase` for rank `dims.rank`, [MAX_PHASES + 1, fields], indexed by the
        phase's number. Unused numbers have zeros."""
        out = np.zeros((MAX_PHASES + 1, len(PHASE_FIELDS)), dtype=np.int32)
        for number, phase in self.by_number.items():
            out[number] = [field.value(phase, dims) for field in PHASE_FIELDS]
        return out

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return the phases for a program file, which names the buffers, operations and so on by their numbers."""
        return {
            name: [{k: v for k, v in asdict(phase).items() if v is not None} for phase in segment]
            for name, segment in zip(("prologue", "body", "epilogue"), self.segments, strict=True)
        }
