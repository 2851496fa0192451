"""The cost of a step's phases, and the least time of the step on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..isa import Dims, Dtype, ModelSizes, Operation, OperationFamily, Phase, attention_cost, cost, link_bytes
from ..isa.access import Columns
from ..machine import Hardware

# For each type of operands that programs compute with, the name by which `Hardware.flops_per_s` knows it.
_RATE = {Dtype.BF16: "bf16", Dtype.F32: "fp32"}
_Work = tuple[float, float, float, float]  # matrix FLOPs, vector FLOPs, memory bytes, bytes sent
BOUNDS = ("math", "vector", "memory", "comms")


@dataclass(frozen=True)
class PhasePart:
    """All instructions of one phase of rank `dims.rank`, in a segment that runs `runs` times."""

    phase: Phase
    columns: Columns
    dims: Dims
    runs: int = 1


@dataclass(frozen=True)
class PhaseCost:
    """The work of one phase in a whole step, and the least times for this work. `instruction` is the phase's name. Each
    amount of work is that of the rank with the largest amount. The phase sends `sent_bytes` to other ranks, in `hops`
    messages of `message_bytes`. Each message is one for which a later instruction waits. `comms_measured_s` uses the
    measured bandwidth of collectives at this message size; it is None if this bandwidth was not measured."""

    instruction: str
    family: OperationFamily
    matrix_flops: float
    vector_flops: float
    memory_bytes: float
    sent_bytes: float
    hops: int
    math_s: float
    vector_s: float
    memory_s: float
    comms_s: float
    comms_measured_s: float | None

    @property
    def message_bytes(self) -> float:
        return self.sent_bytes / self.hops if self.hops else 0.0

    @property
    def bound(self) -> str:
        return bound_name(self.math_s, self.vector_s, self.memory_s, self.comms_s)


@dataclass(frozen=True)
class StepRoofline:
    """The least times of a step in seconds. Each time is that of the rank with the longest. `t_latency_s` is the
    latency of all hops one after another. `t_comms_s` adds to it the bytes sent divided by the egress bandwidth.
    `t_comms_measured_s` uses the machine's measured collective bandwidth at the size of each message; it is None if
    this bandwidth was not measured."""

    t_math_s: float
    t_vector_s: float
    t_memory_s: float
    t_comms_s: float
    t_latency_s: float
    t_comms_measured_s: float | None
    flops: float
    memory_bytes: float
    sent_bytes: float
    instructions: tuple[PhaseCost, ...]

    @property
    def step_s(self) -> float:
        """The time of the step if everything overlaps."""
        return max(self._times)

    @property
    def step_without_overlap_s(self) -> float:
        """The time of the step if nothing overlaps: the sum of the times for matrices, vectors, memory and
        communication."""
        return sum(self._times)

    @property
    def bound(self) -> str:
        return bound_name(*self._times)

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.memory_bytes

    @property
    def _times(self) -> tuple[float, float, float, float]:
        return self.t_math_s, self.t_vector_s, self.t_memory_s, self.t_comms_s


def bound_name(*seconds: float) -> str:
    """The name of the longest of the four times, which are in the order of BOUNDS; among equals the first."""
    return BOUNDS[seconds.index(max(seconds))]


def rate_of(model: ModelSizes, hardware: Hardware) -> str:
    """The type whose rate limits a model's matmuls: int8 where quantised weights are multiplied in integers and the
    hardware's rate of integers is known, else the compute type."""
    return "int8" if model.q8_activations and hardware.rates.int8 else _RATE[Dtype(model.dtype)]


def step_roofline(parts: Sequence[PhasePart], hardware: Hardware, context: float) -> StepRoofline:
    """The roofline of a step in which every token row has `context` KV tokens of its own."""
    dims = parts[0].dims
    peak = hardware.flops_per_s(rate_of(dims.model, hardware))
    egress = hardware.link.egress_bytes_per_s
    hop_s = hardware.costs.node_hop_s if hardware.costs else 0.0
    work = [(part, _work(part, context)) for part in parts]

    def of(phase: Phase) -> PhaseCost:
        mine = [(part, w) for part, w in work if part.phase == phase]
        matrix, vector, memory, sent = _most(mine)
        hops = max(part.runs for part, _ in mine) if sent else 0
        return PhaseCost(
            instruction=phase.name,
            family=phase.family,
            matrix_flops=matrix,
            vector_flops=vector,
            memory_bytes=memory,
            sent_bytes=sent,
            hops=hops,
            math_s=matrix / peak,
            vector_s=vector / hardware.rates.fp32,
            memory_s=memory / hardware.chip.hbm_bytes_per_s,
            comms_s=hops * hop_s + sent / egress,
            comms_measured_s=_measured_s(sent, hops, hardware, dims.split.tp),
        )

    costs = tuple(map(of, dict.fromkeys(part.phase for part in parts)))
    matrix, vector, memory, sent = _most(work)
    hops = sum(c.hops for c in costs)
    measured = [c.comms_measured_s for c in costs]
    return StepRoofline(
        t_math_s=matrix / peak,
        t_vector_s=vector / hardware.rates.fp32,
        t_memory_s=memory / hardware.chip.hbm_bytes_per_s,
        t_comms_s=hops * hop_s + sent / egress,
        t_latency_s=hops * hop_s,
        t_comms_measured_s=None if None in measured else sum(filter(None, measured)),
        flops=matrix,
        memory_bytes=memory,
        sent_bytes=sent,
        instructions=costs,
    )


def _work(part: PhasePart, context: float) -> _Work:
    """Return (matrix FLOPs, vector FLOPs, memory bytes, bytes sent) of a part, for all of its runs together."""
    d = part.dims
    done = cost(part.phase, part.columns, d)
    matrix, vector, memory = (float(c.sum()) for c in (done.matrix_flops, done.vector_flops, done.memory_bytes))
    if part.phase.operation is Operation.ATTENTION and d.split.rank_heads:
        seen = sum(layers * min(context, span) for span, layers in d.model.spans.items()) / d.model.layers
        flops, kv_bytes = attention_cost(d.model, d.bucket.tokens * d.split.rank_kv_heads, seen)
        # If several ranks share a KV head, a rank has only some of the query heads that use this KV head.
        matrix += flops * d.split.rank_heads / (d.split.rank_kv_heads * d.model.group_size)
        memory += kv_bytes
    sent = float(link_bytes(part.phase, part.columns, d).sum()) if d.split.tp > 1 else 0.0
    return matrix * part.runs, vector * part.runs, memory * part.runs, sent * part.runs


def _most(work: Iterable[tuple[PhasePart, _Work]]) -> _Work:
    """For each kind of work, the amount on the rank with the largest amount."""
    sums: dict[int, _Work] = {}
    for part, (matrix, vector, memory, sent) in work:
        a, b, c, d = sums.get(part.dims.split.rank, (0.0, 0.0, 0.0, 0.0))
        sums[part.dims.split.rank] = a + matrix, b + vector, c + memory, d + sent
    matrix, vector, memory, sent = (max(column) for column in zip(*sums.values(), strict=True))
    return matrix, vector, memory, sent


def measured_s(array_bytes: float, hardware: Hardware, members: int, passes: int = 2) -> float | None:
    """Return the seconds of a collective within a node according to the machine's measured curve, or None if this
    number of GPUs was not measured. Bus bandwidth counts the bytes that each member sends. So an all-reduce counts as
    two `passes`, and a gather or a reduce-scatter as one."""
    curve = hardware.curve("all_reduce", members)
    if curve is None:
        return None
    return passes * array_bytes * (members - 1) / members / curve.at(array_bytes)


def _measured_s(sent_bytes: float, messages: int, hardware: Hardware, ranks: int) -> float | None:
    """Return the seconds that `messages` gathers of equal size take at the measured bandwidth; None if not measured. A
    rank sends `sent_bytes` in all, which is (N - 1) / N of the gathered arrays, where N is the number of ranks."""
    if not messages:
        return 0.0
    one = measured_s(sent_bytes / messages * ranks / (ranks - 1), hardware, ranks, passes=1)
    return None if one is None else one * messages
