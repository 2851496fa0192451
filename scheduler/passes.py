"""The passes of the compiler. A model family's forward pass says what a single device computes. Each pass transforms it
into an equivalent forward pass, in which norms are computed elsewhere or ranks share the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest

from megakernel.isa import Buffer, Forward, Operation, Phase, Result, Rows, Split


def apply(
    forward: Forward, part: Split, norm: str = "own", weight_bits: Mapping[Buffer, float] | None = None
) -> Forward:
    """Apply all passes to a family's forward pass. `part` says how ranks share the work, and `norm` where norms are
    computed (see `Options`). `weight_bits` gives the bits per weight of each buffer that is not stored in the compute
    type."""
    return _stored(split(_NORMS[norm](forward), part), weight_bits or {})


def norms_next(forward: Forward) -> Forward:
    """Move the first norm of each layer to the end of the previous layer; that of layer 0 moves to the prologue."""
    norm, *layer = forward.body
    return Forward.of(
        [*forward.prologue, replace(norm, name="first_norm")],
        [*layer, replace(norm, name="next_norm", ahead=int(norm.weights is not None))],
        forward.epilogue,
    )


def norms_inside(forward: Forward) -> Forward:
    """Remove the norms of each layer: a matmul that would read a norm's result normalises the norm's inputs itself.
    This is right only if those inputs do not change between the norm and the matmul. Norms before a router remain.
    Norm phases without weights also remain, because they do not normalise: they only round their inputs."""
    norms: dict[Buffer | None, Phase] = {}  # buffer -> the norm that wrote its present contents
    body = []
    for phase, after in zip_longest(forward.body, forward.body[1:]):
        routed = after is not None and after.operation is Operation.ROUTE
        if phase.operation is Operation.NORM and (routed or phase.weights is None):
            norms.pop(phase.output, None)
            body.append(phase)
        elif phase.operation is Operation.NORM and phase.result is Result.NONE:
            norms[phase.output] = phase
        elif norm := norms.get(phase.inputs):
            body.append(replace(phase, inputs=norm.inputs, norm=norm.weights))
        else:
            body.append(phase)
    return Forward.of(forward.prologue, body, forward.epilogue)


_NORMS: dict[str, Callable[[Forward], Forward]] = {"own": lambda f: f, "next": norms_next, "inside": norms_inside}


_SUMMED = (Result.RESIDUAL, Result.STORED)  # results that ranks must sum if each has a part of the inputs


def split(forward: Forward, part: Split) -> Forward:
    """Divide the phases (operations) among `part.tp` ranks. If ranks share the weights of a matmul whose result is
    added to the residual, each rank computes a partial sum. An inserted reduction over the ranks adds up these sums.
    Every rank computes the whole result of a phase whose `rows` is EVERY."""
    attended = {phase.output for phase in forward if phase.operation is Operation.ATTENTION}

    def divided(phase: Phase) -> list[Phase]:
        whole = part.tp == 1 or phase.rows is Rows.EVERY or (part.replicated_o and phase.inputs in attended)
        if whole or not (phase.adds_products and phase.result in _SUMMED):
            return [replace(phase, rows=_rows(phase))]
        name = phase.name.removesuffix("_proj")
        partial = replace(phase, name=f"{name}_partial", output=Buffer.REDUCE, result=Result.PARTIAL, bias=None)
        total = replace(
            phase,
            name=f"{name}_reduce",
            operation=Operation.REDUCE,
            inputs=Buffer.REDUCE,
            result=Result.STORED if phase.result is Result.STORED else Result.NONE,
        )
        return [replace(partial, rows=_rows(partial)), total]

    return Forward.of(*([part for phase in segment for part in divided(phase)] for segment in forward.segments))


def _rows(phase: Phase) -> Rows:
    """Return which rows a rank computes in a phase: all rows if the rank multiplies them by its own share of the
    weights, otherwise the rows that the phase declares."""
    if phase.operation is Operation.SAMPLE:
        return Rows.SAMPLED
    shared = phase.operation in (Operation.ROPE, Operation.ROUTE, Operation.EXPERTS)
    shared |= phase.result not in (Result.NONE, *_SUMMED)
    return Rows.EVERY if shared and phase.rows is Rows.OWN else phase.rows


def _stored(forward: Forward, weight_bits: Mapping[Buffer, float]) -> Forward:
    """Record in each phase that reads a weight matrix how many bits a weight takes in memory, for the cost model."""

    def stored(phase: Phase) -> Phase:
        bits = weight_bits.get(phase.weights) if phase.reads_weights and phase.weights is not None else None
        return replace(phase, weight_bits=bits)

    return Forward.of(*(tuple(map(stored, segment)) for segment in forward.segments))
