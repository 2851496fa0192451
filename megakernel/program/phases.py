"""Checks that a program's phases make sense on every rank.

A program file contains its phases, and all proofs about its records rely on them. So a phase must
name exactly the buffers that its operation uses, with the right space, type and shape. Otherwise
the boxes that follow from the phase would not describe the data that a backend reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from ..isa import (
    BUFFERS,
    CONTROL,
    DRAIN,
    MAX_PHASES,
    Buffer,
    Dims,
    Dtype,
    Forward,
    Operation,
    Phase,
    Result,
    Rows,
    Space,
)
from ..isa import record as bits
from .limits import MOST
from .segments import SEGMENTS

Ints = NDArray[np.int64]
_PROLOGUE, _BODY, _EPILOGUE = range(len(SEGMENTS))
# For each operation, the buffer fields that its phases must have, and those that they may have.
_BUFFERS: dict[Operation, tuple[set[str], set[str]]] = {
    Operation.GATHER: ({"weights", "output"}, set()),
    Operation.ROPE: ({"weights", "output"}, set()),
    Operation.NORM: ({"weights", "inputs", "output"}, set()),
    Operation.MATMUL: ({"weights", "inputs", "output"}, {"bias", "norm", "head_norm"}),
    Operation.ATTENTION: ({"inputs", "output"}, set()),
    Operation.REDUCE: ({"weights", "inputs", "output"}, {"bias"}),
    Operation.SAMPLE: ({"inputs"}, set()),
}
_FIELDS = ("weights", "inputs", "output", "bias", "norm", "head_norm")
# A buffer's space, type (None: the compute type) and shape.
_Kind = tuple[Space, Dtype | None, tuple[int, ...]]


@lru_cache(maxsize=64)
def all_dims(dims: Dims) -> list[Dims]:
    """Return the sizes as each rank sees them: one Dims per rank, with the sizes of the rank's shards and buffers."""
    return [replace(dims, rank=rank) for rank in range(dims.tp)]


class Phases:
    """Properties of a program's phases that the checks of records need. The arrays are indexed by the number
    of the phase.
    """

    def __init__(self, forward: Forward) -> None:
        self.by_number = forward.by_number
        self.known = np.isin(np.arange(256), list(self.by_number))
        self.segment: Ints = np.full(256, -1)  # index into SEGMENTS of the phase's segment; -1: any segment
        self.segment[DRAIN.number] = _BODY
        # The least and greatest allowed value of each operand of a phase. MOST is so small that the sum of two
        # operands fits into int32. Words after a phase's operands may have any value.
        self.least = np.full((256, bits.OPERANDS), -(1 << 31), dtype=np.int32)
        self.most = np.full((256, bits.OPERANDS), (1 << 31) - 1, dtype=np.int32)
        for number, phase in self.by_number.items():
            self.least[number, : len(phase.operands)] = [name in ("rows", "cols") for name in phase.operands]
            self.most[number, : len(phase.operands)] = MOST
        for segment, phases in enumerate(forward.segments):
            self.segment[[phase.number for phase in phases]] = segment
        self.matmuls = [phase for phase in forward if phase.is_matmul]
        self.attention = next((phase for phase in forward if phase.operation is Operation.ATTENTION), None)
        # Instructions of these phases wait for the row blocks that contain their logit rows.
        self.logit_norms = [p.number for p in forward if p.operation is Operation.NORM and p.rows is Rows.LOGIT]
        # These operations write the residual. Unless every rank keeps the whole residual, a rank keeps
        # only the residual of its own row blocks.
        writers = (Operation.GATHER, Operation.REDUCE)
        self.residual = {p.output for p in forward if p.operation in writers or p.result is Result.RESIDUAL}
        self.partial = {p.output for p in forward if p.result is Result.PARTIAL}


@lru_cache(maxsize=64)
def phases_of(forward: Forward) -> Phases:
    return Phases(forward)


@lru_cache(maxsize=64)
def check_phases(forward: Forward, dims: Dims) -> tuple[str, ...]:
    """Return the first violation in each phase. If no single phase has a violation, return the
    violations that concern several phases together.
    """
    found = []
    for segment, phases in enumerate(forward.segments):
        for phase in phases:
            violations = _phase(phase, segment, dims)
            found += [f"phase {phase.name}: {what}" for what in [next(violations, None)] if what]
    return tuple(found or _together(forward))


def _phase(p: Phase, segment: int, dims: Dims) -> Iterator[str]:
    if p.control:
        yield "a control operation cannot be a phase of a forward pass"
        return
    if p.is_matmul != (p.result is not Result.NONE):
        yield "a matmul must have a result, and other operations must have none"
    named = {field for field in _FIELDS if getattr(p, field) is not None}
    must, may = _BUFFERS[p.operation]
    if p.result is Result.PARTIAL:
        may = may - {"bias"}  # the reduction adds the bias; the matmuls of all ranks would add it several times
    if p.result is not Result.HEADS:
        may = may - {"head_norm"}
    if not must <= named <= must | may:
        yield f"it must name {_list(must)} and may name {_list(may)}; it names {_list(named)}"
        return
    if p.weight_bits is not None and not (p.reads_weights and 0 < p.weight_bits < inf):
        yield f"it cannot have weights of {p.weight_bits} bits"
    yield from _place(p, segment, dims.layers)
    if p.inputs is not None and p.inputs is p.output:
        yield f"it reads and writes {p.inputs.name}"
    if p.result is Result.HEADS and p.output is not Buffer.Q:
        yield "its output is not Q"
    if p.operation is Operation.ATTENTION and p.output is not Buffer.ATTN:
        yield "its output is not ATTN"
    for d in all_dims(dims):
        for field, wanted in _wanted(p, d).items():
            buffer = getattr(p, field)
            if buffer is not None and (found := _kind(buffer, d)) != wanted:
                yield f"its {field} {buffer.name} are {_text(found)}, not {_text(wanted)} (rank {d.rank})"
    if p.result in (Result.RESIDUAL, Result.PARTIAL):
        parts = [p.inner(d) for d in all_dims(dims)]
        whole = p.inner(replace(dims, tp=1))
        if sum(parts) != whole if p.result is Result.PARTIAL else set(parts) != {whole}:
            yield f"its inner length is {whole}, of which the ranks have {parts}: this does not fit its result"


def _place(p: Phase, segment: int, layers: int) -> Iterator[str]:
    """Check that the phase is in a segment where it may be, and that its rows are allowed in this segment."""
    logits = p.result is Result.LOGITS or p.operation is Operation.SAMPLE
    if p.result is Result.HEADS or p.operation is Operation.ATTENTION:
        home = {_BODY}
    elif logits or p.rows is Rows.LOGIT:
        home = {_EPILOGUE}
    else:
        home = {_PROLOGUE, _BODY, _EPILOGUE}
    if segment not in home:
        yield f"it cannot be in the {SEGMENTS[segment]}"
    rows = {Rows.EVERY, Rows.OWN}
    if logits:
        rows = {Rows.SAMPLED if p.operation is Operation.SAMPLE else Rows.LOGIT}
    elif p.operation is Operation.NORM:
        rows |= {Rows.LOGIT}
    if p.rows not in rows:
        yield f"it cannot have the rows {p.rows.name}"
    layered = [b for b in (p.weights, p.bias, p.norm, p.head_norm) if b is not None and BUFFERS[b].layered]
    if layered and segment == _EPILOGUE:
        yield f"{layered[0].name} has a copy for each layer, and the epilogue has no layer"
    if not 0 <= p.ahead <= (layers if layered else 0):
        yield f"its weights cannot be those of {p.ahead} layers ahead"


def _kind(buffer: Buffer, d: Dims) -> _Kind:
    spec = BUFFERS[buffer]
    return spec.space, spec.dtype, spec.shape(d, 0)


def _wanted(p: Phase, d: Dims) -> dict[str, _Kind]:
    """The required properties of the buffers that a phase names, as rank `d.rank` has them."""
    shape = () if p.weights is None else BUFFERS[p.weights].shape(d, 0)
    inner, width = (*shape[::-1], 0, 0)[:2]
    rows = d.logit_rows if p.rows in (Rows.LOGIT, Rows.SAMPLED) else d.tokens
    logits = Space.OUTPUT, Dtype.F32, (d.logit_rows, d.vocab)
    partials = _activations(d.tp * d.own_rows, width)
    match p.operation:
        case Operation.GATHER:
            return {"weights": _weights(d.vocab, inner), "output": _activations(d.tokens, inner, Dtype.F32)}
        case Operation.ROPE:
            return {"weights": _vector(d.head_dim // 2), "output": _activations(d.tokens, d.head_dim, Dtype.F32)}
        case Operation.NORM:
            inputs = _activations(d.tokens, inner, Dtype.F32)
            return {"weights": _vector(inner), "inputs": inputs, "output": _activations(rows, inner)}
        case Operation.ATTENTION:
            return {"inputs": _kind(Buffer.Q, d), "output": _kind(Buffer.ATTN, d)}
        case Operation.REDUCE:
            output = _activations(d.tokens, width, Dtype.F32)
            return {"weights": _weights(width, inner), "inputs": partials, "output": output, "bias": _vector(width)}
        case Operation.SAMPLE:
            return {"inputs": logits}
    matrices = (2,) if p.result is Result.GATED else ()
    outputs = {
        Result.HEADS: (d.qkv_cols, _kind(Buffer.Q, d)),
        Result.RESIDUAL: (width, _activations(d.tokens, width, Dtype.F32)),
        Result.PARTIAL: (width, partials),
        Result.GATED: (width, _activations(d.tokens, width)),
        Result.LOGITS: (d.rank_vocab, logits),
    }
    width, output = outputs[p.result]
    return {
        "weights": _weights(*matrices, width, inner),
        "inputs": _activations(rows, inner, None if p.norm is None else Dtype.F32),
        "output": output,
        "bias": _vector(*matrices, width),
        "norm": _vector(inner),
        "head_norm": _vector(2, d.head_dim),
    }


def _weights(*shape: int) -> _Kind:
    return Space.WEIGHT, None, shape


def _vector(*shape: int) -> _Kind:
    return Space.WEIGHT, Dtype.F32, shape


def _activations(rows: int, cols: int, dtype: Dtype | None = None) -> _Kind:
    return Space.ACTIVATION, dtype, (rows, cols)


def _text(kind: _Kind) -> str:
    space, dtype, shape = kind
    return f"{space.value}s {list(shape)} of {'the compute type' if dtype is None else dtype.name}"


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _together(forward: Forward) -> Iterator[str]:
    phases = forward.phases
    if [p.number for p in phases] != list(range(1 + len(CONTROL), 1 + MAX_PHASES))[: len(phases)]:
        yield f"phases are not numbered in order, up to {MAX_PHASES}"
    if len(forward.by_name) != len(forward.by_number):
        yield "two phases have the same name"
    attention = forward.numbers(Operation.ATTENTION)
    if len(attention) > 1:
        yield "there is more than one attention phase"
    if len(forward.numbers(Operation.SAMPLE)) != 1:
        yield "there is not exactly one phase that samples"
    heads = forward.numbers(Operation.MATMUL, Result.HEADS)
    if attention and heads and max(heads) > attention[0]:
        yield "keys and values are overwritten after the attention that reads them"
    for p in phases:
        if p.operation is Operation.REDUCE and not _is_reduced(forward, p):
            yield f"phase {p.name}: the last results stored in its inputs are not partial products of its weights"


def _is_reduced(forward: Forward, p: Phase) -> bool:
    """Whether the inputs of `p` hold partial sums to add. The last phase before `p` that writes these
    inputs, in the same segment, must store partial sums of the same weights.
    """
    segment = next(s for s in forward.segments if p in s)
    before = [q for q in segment[: segment.index(p)] if q.output is p.inputs]
    return bool(before) and before[-1].result is Result.PARTIAL and before[-1].weights is p.weights
