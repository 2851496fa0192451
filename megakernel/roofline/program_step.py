"""Computes the work of each phase of a compiled program, and the least time of a step on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add

from ..isa import Dims, Dtype, ModelSizes, Operation, Phase, attention_cost, cost, link_bytes
from ..isa.access import Columns
from ..machine import Hardware

# The names that `Hardware.flops_per_s` uses for the compute types.
_RATE = {Dtype.BF16: "bf16", Dtype.F32: "fp32"}
_Work = tuple[float, ...]  # matrix FLOPs, vector FLOPs, memory bytes, bytes sent
BOUNDS = ("math", "vector", "memory", "comms")


@dataclass(frozen=True)
class PhasePart:
    """The instructions of one phase on rank `dims.split.rank`. `columns` has their operands. `runs` is how often a step
    runs the phase: once per layer, or once if the phase precedes or follows all layers."""

    phase: Phase
    columns: Columns
    dims: Dims
    runs: int = 1


@dataclass(frozen=True)
class LeastTimes:
    """The work of a step, or of one of its phases in all layers, and the least times for this work. Each amount of work
    is that of the rank with most."""

    matrix_flops: float
    vector_flops: float
    memory_bytes: float
    sent_bytes: float
    hops: int  # messages in which a rank sends these bytes, one after another
    math_s: float
    vector_s: float
    memory_s: float
    comms_s: float  # the latency, and the time to move the bytes
    latency_s: float  # of all messages together
    comms_measured_s: float | None  # by measured bandwidths of collectives; None if there are none

    @property
    def seconds(self) -> tuple[float, ...]:
        """The times of the four kinds of work in BOUNDS. If they overlap, the longest counts, otherwise their sum."""
        return self.math_s, self.vector_s, self.memory_s, self.comms_s

    @property
    def bound(self) -> str:
        return BOUNDS[self.seconds.index(max(self.seconds))]


def rate_of(model: ModelSizes, hardware: Hardware) -> str:
    """Return the type whose FLOP/s limits a model's matmuls: the compute type, or int8. It is int8 if quantised weights
    are multiplied in integers and the machine's integer rate is known."""
    return "int8" if model.q8_activations and hardware.rates.int8 else _RATE[Dtype(model.dtype)]


def step_roofline(
    parts: Sequence[PhasePart], hardware: Hardware, context: float
) -> tuple[LeastTimes, dict[Phase, LeastTimes]]:
    """Return the least times of a step, and of each of its phases. Every token row attends to `context` KV tokens,
    which no other row reads."""
    dims = parts[0].dims
    peak = hardware.flops_per_s(rate_of(dims.model, hardware))
    hop_s = hardware.costs.node_hop_s if hardware.costs else 0.0
    work = [(part, _work(part, context)) for part in parts]

    def least(amounts: _Work, hops: int, measured_s: float | None) -> LeastTimes:
        matrix, vector, memory, sent = amounts
        return LeastTimes(
            matrix,
            vector,
            memory,
            sent,
            hops,
            math_s=matrix / peak,
            vector_s=vector / hardware.rates.fp32,
            memory_s=memory / hardware.chip.hbm_bytes_per_s,
            comms_s=hops * hop_s + sent / hardware.link.egress_bytes_per_s,
            latency_s=hops * hop_s,
            comms_measured_s=measured_s,
        )

    def of(phase: Phase) -> LeastTimes:
        mine = [(part, w) for part, w in work if part.phase == phase]
        amounts = _most(mine)
        if not (sent := amounts[-1]):
            return least(amounts, 0, 0.0)
        hops, ranks = max(part.runs for part, _ in mine), dims.split.tp
        # The rank sends (N - 1) / N of the array of each of `hops` gathers of equal size.
        one = measured_s(sent / hops * ranks / (ranks - 1), hardware, ranks, passes=1)
        return least(amounts, hops, None if one is None else one * hops)

    phases = {phase: of(phase) for phase in dict.fromkeys(part.phase for part in parts)}
    measured = [each.comms_measured_s for each in phases.values()]
    total = None if None in measured else sum(filter(None, measured))
    return least(_most(work), sum(each.hops for each in phases.values()), total), phases


def _work(part: PhasePart, context: float) -> _Work:
    """Return (matrix FLOPs, vector FLOPs, memory bytes, bytes sent) of one phase on a rank, in all layers together."""
    d = part.dims
    done = cost(part.phase, part.columns, d)
    matrix, vector, memory = (float(c.sum()) for c in (done.matrix_flops, done.vector_flops, done.memory_bytes))
    if part.phase.operation is Operation.ATTENTION and d.split.rank_heads:
        seen = sum(layers * min(context, span) for span, layers in d.model.spans.items()) / d.model.layers
        flops, kv_bytes = attention_cost(d.model, d.bucket.tokens * d.split.rank_kv_heads, seen)
        # If several ranks have the same KV head, a rank has only some of the query heads that use it.
        matrix += flops * d.split.rank_heads / (d.split.rank_kv_heads * d.model.group_size)
        memory += kv_bytes
    sent = float(link_bytes(part.phase, part.columns, d).sum()) if d.split.tp > 1 else 0.0
    return matrix * part.runs, vector * part.runs, memory * part.runs, sent * part.runs


def _most(work: Iterable[tuple[PhasePart, _Work]]) -> _Work:
    """Add up the work of each rank. Return the four amounts, each as the maximum over all ranks."""
    sums: dict[int, _Work] = {}
    for part, amounts in work:
        before = sums.get(part.dims.split.rank, (0.0, 0.0, 0.0, 0.0))
        sums[part.dims.split.rank] = tuple(map(add, before, amounts))
    return tuple(map(max, zip(*sums.values(), strict=True)))


def measured_s(array_bytes: float, hardware: Hardware, members: int, passes: int = 2) -> float | None:
    """Return the seconds of a collective over `members` GPUs of a node, computed from measured all-reduce bandwidths.
    None means that no bandwidth was measured for this number of GPUs. `passes` is 2 for an all-reduce, and 1 for a
    gather or a reduce-scatter."""
    curve = hardware.curve("all_reduce", members)
    if curve is None:
        return None
    return passes * array_bytes * (members - 1) / members / curve.at(array_bytes)
