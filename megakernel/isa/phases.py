"""A model's forward pass as data: the phases, in the order in which a step runs them.

A model file (`megakernel/model/families`) lists the phases. Regions, costs, pages and dependencies follow from a
phase's parameters. No code depends on a phase's name, which is only for people. The first byte of a record is its
phase's number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from .buffers import BUFFERS, Buffer
from .dims import Dims, ModelSizes, Split
from .dtypes import Dtype
from .opcodes import Operation, OperationFamily, Result, Rows
from .record import OPERAND_WORD, Column, Records

NO_BUFFER = -1
MAX_PHASES = 31  # maximum number of phases of a program, including the control operations


@dataclass(frozen=True)
class Phase:
    """One operation with its parameters; the instructions of a phase differ only in their operands.

    `weights`      the matrix or matrices of a matmul, the scale of a norm or None, the table of a gather, the sinks
                   of attention or None; for a sum, the matrix or the matrices of experts whose products it adds
    `bias`         added to the results; None if the model has none
    `norm`         the scale of an RMS norm that a matmul applies to its inputs first
    `head_norm`    the scales of the RMS norms of each head of q and of k, applied before the rotation
    `ahead`        0 if the phase uses the weights of the current layer; n if it uses those of the layer n layers
                   later, or of the last layer if there are fewer
    `weight_bits`  bits per weight in memory, the mean if there are several types; None means the compute type's bits

    `number` is the phase's place in its `Forward`.
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
        """Whether the phase reads a weight matrix. REDUCE and COMBINE add products that others have made with it."""
        return self.operation in (Operation.MATMUL, Operation.GATHER, Operation.ROUTE, Operation.EXPERTS)

    @property
    def adds_products(self) -> bool:
        """Whether the phase adds products of its inputs and a weight matrix, of which each rank may have a part."""
        return self.operation in (Operation.MATMUL, Operation.COMBINE)

    @property
    def operands(self) -> tuple[str, ...]:
        return self.operation.layout.operands

    def columns(self, records: Records) -> dict[str, Column]:
        """The operand columns of this phase's records."""
        return {name: records[:, OPERAND_WORD + i] for i, name in enumerate(self.operands)}

    # -- The following methods return sizes of the part of rank `split.rank`.

    def inner(self, split: Split) -> int:
        """The length of a matmul's dot products, or of a norm's rows."""
        unscaled = self.weights is None and self.operation is Operation.NORM
        return split.model.hidden if unscaled else self._shape(split)[-1]

    def width(self, split: Split) -> int:
        """The number of output columns of a matmul or of EXPERTS; 0 if the rank has nothing to multiply."""
        multiplies = self.is_matmul or self.operation is Operation.EXPERTS
        return self._shape(split)[-2] if multiplies and self.inner(split) else 0

    def matrices(self, split: Split) -> int:
        """The number of matrices of a matmul or an expert; an output column is made from one column of each matrix."""
        shape = self._shape(split)
        return shape[0] if len(shape) == 3 else 1

    def whole_heads(self, model: ModelSizes) -> bool:
        """Whether a tile must contain whole heads, because a head is normalised or quantised for the KV cache."""
        return self.result is Result.HEADS and (self.head_norm is not None or model.quantised_kv > 0)

    def stored_bits(self, model: ModelSizes) -> float:
        """The number of bits per weight in memory."""
        return Dtype(model.dtype).bits if self.weight_bits is None else self.weight_bits

    def ranks(self, split: Split) -> int:
        """The number n of ranks that hold a part of the inner dimension of the weights. These are ranks 0 to n - 1."""
        return sum(self.inner(part) > 0 for part in split.ranks)

    def _shape(self, split: Split) -> tuple[int, ...]:
        """The shape of the weights, or of those of one expert."""
        part = None if self.weights is None else BUFFERS[self.weights].part
        # A program file may name a buffer that has no weights, which `check_phases` refuses.
        return (0, 0) if part is None else part(split.model, split)


@dataclass(frozen=True)
class PhaseField:
    """A field of the C++ struct `Phase`, which describes a phase as one rank sees it. `kind` is its C++ type."""

    name: str
    kind: str
    what: str
    value: Callable[[Phase, Dims], int]


def _buffer(name: str) -> Callable[[Phase, Dims], int]:
    def value(phase: Phase, dims: Dims) -> int:
        buffer: Buffer | None = getattr(phase, name)
        return NO_BUFFER if buffer is None else int(buffer)

    return value


def _reduced_ranks(phase: Phase, dims: Dims) -> int:
    return phase.ranks(dims.split) if phase.operation is Operation.REDUCE else 0


PHASE_FIELDS: tuple[PhaseField, ...] = (
    PhaseField("operation", "Operation", "", lambda p, d: p.operation),
    PhaseField("rows", "Rows", "", lambda p, d: p.rows),
    PhaseField("result", "Result", "of a matmul", lambda p, d: p.result),
    PhaseField("weights", "Buffer", "", _buffer("weights")),
    PhaseField("bias", "Buffer", "kNone if the phase adds no bias; likewise for norm and head_norm", _buffer("bias")),
    PhaseField("norm", "Buffer", "scale of the RMS norm that is applied to the inputs", _buffer("norm")),
    PhaseField("head_norm", "Buffer", "scales of the RMS norms of q heads and k heads", _buffer("head_norm")),
    PhaseField("inputs", "Buffer", "", _buffer("inputs")),
    PhaseField("output", "Buffer", "", _buffer("output")),
    PhaseField(
        "ahead", "int32_t", "weights are of the layer that is so much later, or of the last", lambda p, d: p.ahead
    ),
    PhaseField("inner", "int32_t", "length of each dot product (K)", lambda p, d: p.inner(d.split)),
    PhaseField("width", "int32_t", "output columns", lambda p, d: p.width(d.split)),
    PhaseField("matrices", "int32_t", "number of weight matrices", lambda p, d: p.matrices(d.split)),
    PhaseField("ranks", "int32_t", "number of ranks whose partial sums a reduction adds", _reduced_ranks),
)

# The control phases: every program contains them, under these numbers.
JOIN = Phase("join", Operation.JOIN, number=1)
DRAIN = Phase("drain", Operation.DRAIN, number=2)
CONTROL = (JOIN, DRAIN)


@dataclass(frozen=True)
class Forward:
    """The phases of a step, numbered in execution order: the prologue, the body for each layer, the epilogue."""

    prologue: tuple[Phase, ...]
    body: tuple[Phase, ...]
    epilogue: tuple[Phase, ...]

    @staticmethod
    def of(*segments: Sequence[Phase]) -> Forward:
        """Number the phases of the three segments."""
        if sum(map(len, segments)) > MAX_PHASES - len(CONTROL):
            raise MegakernelError(f"a forward pass has at most {MAX_PHASES - len(CONTROL)} phases")
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
        """All phases by number. The first byte of a record is its phase's number."""
        return {phase.number: phase for phase in (*CONTROL, *self.phases)}

    @cached_property
    def by_name(self) -> dict[str, Phase]:
        return {phase.name: phase for phase in self.by_number.values()}

    def numbers(self, operation: Operation) -> list[int]:
        """The numbers of the phases with this operation."""
        return [p.number for p in self.by_number.values() if p.operation is operation]

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.phases)

    def words(self, dims: Dims) -> NDArray[np.int32]:
        """The C++ structs `Phase` as rank `dims.rank` sees them: [MAX_PHASES + 1, fields]; zeros for unused numbers."""
        out = np.zeros((MAX_PHASES + 1, len(PHASE_FIELDS)), dtype=np.int32)
        for number, phase in self.by_number.items():
            out[number] = [field.value(phase, dims) for field in PHASE_FIELDS]
        return out

    # -- as JSON

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [{k: v for k, v in asdict(phase).items() if v is not None} for phase in segment]
            for name, segment in zip(("prologue", "body", "epilogue"), self.segments, strict=True)
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Forward:
        """Return the Forward from which `to_json` made `value`. Raises MegakernelError if `value` is malformed."""
        try:
            return Forward.of(*(tuple(map(_phase, value[name])) for name in ("prologue", "body", "epilogue")))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
            raise MegakernelError(f"the program's list of phases is malformed: {e}") from e


_ENUMS: dict[str, type[int]] = {
    "operation": Operation,
    "rows": Rows,
    "result": Result,
    **dict.fromkeys(("weights", "inputs", "output", "bias", "norm", "head_norm"), Buffer),
}


def _phase(row: Mapping[str, Any]) -> Phase:
    known = {field.name for field in fields(Phase)}
    if not isinstance(row.get("name"), str) or set(row) - known:
        raise ValueError(f"a phase lacks a name or has unknown fields: its fields are {sorted(row)}")
    kinds: dict[str, Callable[[Any], Any]] = {**_ENUMS, "name": str, "weight_bits": float}
    return Phase(**{key: kinds.get(key, int)(value) for key, value in row.items()})
