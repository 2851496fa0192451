"""Checks that a program's phases (operations with parameters) make sense on every rank.

What an instruction may access is derived from its phase, and a program file contains its phases. A wrong phase could
therefore lead to accesses outside the declared data. So each phase must name exactly the buffers that its operation
uses, with the right purpose, type and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, CONTROL, DRAIN, MAX_PHASES, OPERATIONS, Buffer, Dims, Forward, Operation, Phase, Result, Rows
from ..isa import record as bits
from ..isa.buffers import given
from ..isa.operations.spec import FIELDS, OPTIONAL, Contents, contents
from .program import SEGMENTS

Ints = NDArray[np.int64]
_PROLOGUE, _BODY, _EPILOGUE = range(len(SEGMENTS))
# The maximum of any operand, any size, and any number of rows or columns. The sum of eight fits into int32.
MOST = (1 << 28) - 1


class Phases:
    """Facts about a program's phases that the checks of instructions need. Arrays are indexed by the phase's number."""

    def __init__(self, forward: Forward) -> None:
        self.by_number = forward.by_number
        self.known = np.isin(np.arange(256), list(self.by_number))
        self.segment: Ints = np.full(256, -1)  # index of the phase's segment in SEGMENTS; -1: any
        self.segment[DRAIN.number] = _BODY
        # The least and the greatest allowed value of each operand, by phase number and operand. MOST is so small that
        # the sum of two operands fits into int32. The unused words of a record may have any value.
        self.least = np.full((256, bits.OPERANDS), -(1 << 31), dtype=np.int32)
        self.most = np.full((256, bits.OPERANDS), (1 << 31) - 1, dtype=np.int32)
        for number, phase in self.by_number.items():
            self.least[number, : len(phase.operands)] = [name in ("rows", "cols") for name in phase.operands]
            self.most[number, : len(phase.operands)] = MOST
        for segment, phases in enumerate(forward.segments):
            self.segment[[phase.number for phase in phases]] = segment
        self.matmuls = [phase for phase in forward if phase.is_matmul]
        self.experts = [phase for phase in forward if phase.operation is Operation.EXPERTS]
        self.attention = next((phase for phase in forward if phase.operation is Operation.ATTENTION), None)
        # The norms that compute only the rows that get logits. They wait for these rows' row blocks (groups of rows).
        self.logit_norms = [p.number for p in forward if p.operation is Operation.NORM and p.rows is Rows.LOGIT]
        # The buffers of the residual stream, and of results that a norm will add to it (STORED). A rank uses only the
        # row blocks (groups of rows) that it owns, or all rows if the residual is replicated.
        writers = (Operation.GATHER, Operation.REDUCE)
        own = [p for p in forward if p.rows is Rows.OWN]
        self.residual = {
            p.output for p in own if p.operation in writers or p.result in (Result.RESIDUAL, Result.STORED)
        }
        self.partial = {p.output for p in forward if p.result is Result.PARTIAL}


@lru_cache(maxsize=64)
def phases_of(forward: Forward) -> Phases:
    return Phases(forward)


@lru_cache(maxsize=64)
def check_phases(forward: Forward, dims: Dims) -> tuple[str, ...]:
    """Describe the first violation in each phase. If there is none, describe violations that concern several phases."""
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
    if p.result not in OPERATIONS[p.operation].results:
        yield f"it cannot have the result {p.result.name}"
    named = {field for field in FIELDS if getattr(p, field) is not None}
    known = set(OPERATIONS[p.operation].buffers(p, dims))
    must, may = known - OPTIONAL, known & OPTIONAL
    if not must <= named <= known:
        yield f"it must name {_list(must)} and may name {_list(may)}; it names {_list(named)}"
        return
    if p.weight_bits is not None and not (p.reads_weights and 0 < p.weight_bits < inf):
        yield f"it cannot have weights of {p.weight_bits} bits"
    yield from _place(p, segment, dims.model.layers)
    if p.inputs is not None and p.inputs is p.output:
        yield f"it reads and writes {p.inputs.name}"
    if p.result is Result.HEADS and p.output is not Buffer.Q:
        yield "its output is not Q"
    if p.operation is Operation.ATTENTION and p.output is not Buffer.ATTN:
        yield "its output is not ATTN"
    for d in dims.ranks:
        for field, wanted in OPERATIONS[p.operation].buffers(p, d).items():
            buffer = getattr(p, field)
            if buffer is not None and (found := contents(buffer, d)) != wanted:
                yield f"its {field} {buffer.name} are {_text(found)}, not {_text(wanted)} (rank {d.split.rank})"
    if p.adds_products and p.result in (Result.RESIDUAL, Result.PARTIAL, Result.STORED):
        parts = [_inner(p, d) for d in dims.ranks]
        whole = _inner(p, dims.changed(tp=1))
        if sum(parts) != whole if p.result is Result.PARTIAL else set(parts) != {whole}:
            yield f"its inner length is {whole}, of which the ranks have {parts}: this does not fit its result"


def _inner(p: Phase, d: Dims) -> int:
    """Return the length of a phase's dot products on a rank, added up over its experts if each has its own weights."""
    return p.inner(d.split) * (prod(d.split.stack) if BUFFERS[given(p.weights)].per_expert else 1)


def _place(p: Phase, segment: int, layers: int) -> Iterator[str]:
    """Yield a violation if the phase, or its kind of rows, is not allowed in this segment (prologue, body, ...)."""
    rows = OPERATIONS[p.operation].rows(p)
    if p.result is Result.HEADS or p.operation is Operation.ATTENTION:
        home = {_BODY}
    elif p.rows is Rows.LOGIT or Rows.OWN not in rows:
        home = {_EPILOGUE}
    else:
        home = {_PROLOGUE, _BODY, _EPILOGUE}
    if segment not in home:
        yield f"it cannot be in the {SEGMENTS[segment]}"
    if p.rows not in rows:
        yield f"it cannot have the rows {p.rows.name}"
    layered = [b for b in (p.weights, p.bias, p.norm, p.head_norm) if b is not None and BUFFERS[b].layered]
    if layered and segment == _EPILOGUE:
        yield f"{layered[0].name} has a copy for each layer, and the epilogue has no layer"
    if not 0 <= p.ahead <= (layers if layered else 0):
        yield f"its weights cannot be those of {p.ahead} layers ahead"


def _text(found: Contents) -> str:
    space, dtype, shape = found
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
    heads = [p.number for p in phases if p.result is Result.HEADS]
    if attention and heads and max(heads) > attention[0]:
        yield "keys and values are overwritten after the attention that reads them"
    for p in phases:
        if p.operation is Operation.REDUCE and not _is_reduced(forward, p):
            yield f"phase {p.name}: the last results stored in its inputs are not partial products of its weights"


def _is_reduced(forward: Forward, p: Phase) -> bool:
    """Whether the last phase that wrote the inputs of `p` stored partial sums of products with `p.weights`."""
    segment = next(s for s in forward.segments if p in s)
    before = [q for q in segment[: segment.index(p)] if q.output is p.inputs]
    return bool(before) and before[-1].result is Result.PARTIAL and before[-1].weights is p.weights
