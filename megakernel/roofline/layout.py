"""Layouts of a model over GPUs, and the least time of a training step or a decoding step with a layout.

The axes of a layout, from the innermost to the outermost, are tensor, expert, pipeline and data parallelism. If inner
axes already shard an array, a gather over an outer axis moves less of the array through a link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..machine import OPERAND_BYTES, Hardware
from .collectives import axis_seconds, exchange_seconds
from .shapes import Shape

_BF16 = OPERAND_BYTES["bf16"]
WEIGHT_BYTES = 2.0  # bf16
OPTIMIZER_BYTES = 8.0  # bytes per parameter, for Adam's two moments in fp32

# A layer's forward pass has a gather and a scatter around attention, and another pair around the MLP.
_GATHERS_PER_LAYER = 4


@dataclass(frozen=True)
class Layout:
    """The number of ways of tensor (`tp`), expert (`ep`), pipeline (`pp`) and data parallelism (`dp`). `zero` is 0 if
    every data-parallel rank has all state, 1 if the optimizer state is sharded over these ranks, and 3 if the weights
    are sharded too.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0

    @property
    def gpus(self) -> int:
        return self.tp * self.ep * self.pp * self.dp

    def __str__(self) -> str:
        axes = (("TP", self.tp), ("EP", self.ep), ("PP", self.pp), ("DP", self.dp))
        cut = " x ".join(f"{name} {ways}" for name, ways in axes if ways > 1) or "1 GPU"
        return f"{cut}, ZeRO-{self.zero}" if self.zero else cut


@dataclass(frozen=True)
class LayoutTime:
    """The least times of a step with a layout. `comms_s` has the seconds of communication at each level of the network.
    `fixed_s` is time that overlaps with nothing: pipeline bubbles and hops between pipeline stages.
    """

    layout: Layout
    microbatches: int
    math_s: float
    memory_s: float
    comms_s: dict[str, float]
    fixed_s: float
    overlapped_s: float
    bytes_per_gpu: float
    fits: bool
    tokens_per_s: float
    why: str

    @property
    def step_s(self) -> float:
        return self.overlapped_s + self.fixed_s


def train_step(shape: Shape, hardware: Hardware, layout: Layout, tokens: float, sequence_tokens: int) -> LayoutTime:
    """Return the least times of a training step over a batch of `tokens`. The step takes 6 FLOPs per active parameter
    and token; attention scores are not counted.

    The forward pass and the backward pass each take as long as the longest of arithmetic, memory and communication.
    ZeRO-3 gathers the weights in both passes and scatters gradients; ZeRO-0 and 1 gather and scatter once, during the
    backward pass. A replica's sequences are divided into microbatches, each of which reads the weights. For n
    sequences, the number of microbatches is the best of n, n/2, n/4, ...; more microbatches mean smaller bubbles
    between stages. Memory holds weights, optimizer state, and one activation checkpoint per layer and token of the
    microbatches in flight.
    """
    most = max(1, int(tokens / (layout.dp * layout.ep) // sequence_tokens))
    counts = [most >> i for i in range(most.bit_length())]
    times = (_train_step(shape, hardware, layout, tokens, count) for count in counts)
    return min(times, key=lambda t: (not t.fits, t.step_s))


def _train_step(shape: Shape, hardware: Hardware, layout: Layout, tokens: float, microbatches: int) -> LayoutTime:
    y, e, z, x = layout.tp, layout.ep, layout.pp, layout.dp
    levels = hardware.levels(layout.gpus)
    replica_tokens = tokens / (x * e)
    math_s = 2 * shape.active_parameters * tokens / (layout.gpus * hardware.flops_per_s("bf16"))
    local = (shape.dense_parameters - shape.embedding_parameters + shape.expert_parameters / e) / (y * z)
    memory_s = microbatches * WEIGHT_BYTES * local / hardware.chip.hbm_bytes_per_s

    weights = _added(
        axis_seconds(WEIGHT_BYTES * shape.dense_parameters, levels, y * z, x * e),
        axis_seconds(WEIGHT_BYTES * shape.expert_parameters, levels, y * e * z, x),
    )
    activations = _BF16 * replica_tokens * shape.hidden
    tensor = axis_seconds(activations, hardware.levels(y), 1, y)
    experts = _exchange(shape, hardware, activations * e, y, e)
    inner = _times(_added(_times(tensor, _GATHERS_PER_LAYER), _times(experts, 2)), shape.layers / z)
    forward = _added(inner, weights) if layout.zero == 3 else inner
    backward = _added(inner, _times(weights, 2))
    overlapped = max(math_s, memory_s, *forward.values()) + max(2 * math_s, 2 * memory_s, *backward.values())

    bubble, fixed = bubble_fraction(z, microbatches), 0.0
    if z > 1:
        hop_rate = _stage_bytes_per_s(hardware, y * e, layout.gpus)
        hops = 2 * pipeline_comms_s(replica_tokens * e, shape.hidden, microbatches, z, hop_rate)
        fixed = overlapped * bubble / (1 - bubble) + hops
    held = _train_bytes(shape, layout, replica_tokens * min(1.0, z / microbatches))
    comms = _added(forward, backward)
    return LayoutTime(
        layout=layout,
        microbatches=microbatches,
        math_s=3 * math_s,
        memory_s=3 * memory_s,
        comms_s=comms,
        fixed_s=fixed,
        overlapped_s=overlapped,
        bytes_per_gpu=held,
        fits=held <= hardware.chip.hbm_bytes,
        tokens_per_s=tokens / (overlapped + fixed),
        why=_why(hardware, 3 * math_s, 3 * memory_s, comms, bubble, held),
    )


def decode_step(shape: Shape, hardware: Hardware, layout: Layout, sequences: float, context: float) -> LayoutTime:
    """Return the least times of a step that adds one token to each of `sequences`, which have `context` KV tokens each.
    All data except the weights is bf16.

    Each data-parallel replica has a share of the sequences. Each pipeline stage has one microbatch at a time, and in a
    step every microbatch passes all stages. Weights are read once per microbatch, but experts only if a token chose
    them. If there are more tensor-parallel ranks than KV heads, several ranks have the same KV head. The memory of
    activations is not counted.
    """
    y, e, z = layout.tp, layout.ep, layout.pp
    replica = sequences / layout.dp
    rows = replica / z  # rows of one microbatch, on all ranks of the replica together
    peak = hardware.flops_per_s("bf16")
    stage = shape.layers / z
    kv_ways = min(y, shape.kv_heads)
    dense = (shape.dense_parameters - shape.embedding_parameters) / (y * z)
    touched = shape.expert_parameters * (1 - (1 - shape.active / shape.experts) ** rows) / (y * e * z)
    flops = 2 * shape.active_parameters * rows / (y * e * z)
    flops += 4 * rows * context * stage * shape.heads * shape.head_dim / (y * e)
    kv_bytes = _BF16 * rows / e * context * stage * shape.kv_width / kv_ways
    read = shape.weight_bytes * (dense + touched) + kv_bytes

    activations = _BF16 * rows / e * shape.hidden
    gather = axis_seconds(activations, hardware.levels(y), 1, y)
    exchange = _exchange(shape, hardware, activations * e, y, e)
    layer = _added(_with_hops(hardware, exchange, 2, 2), _tensor_seconds(hardware, gather, y))
    comms = _times(layer, shape.layers)
    math_s, memory_s = z * flops / peak, z * read / hardware.chip.hbm_bytes_per_s
    hop_rate = _stage_bytes_per_s(hardware, y * e, layout.gpus)
    crossing = "node" if y * e * z <= hardware.node.gpus else "leaf"
    fixed = z * (_BF16 * rows * shape.hidden / hop_rate + _hop_s(hardware, crossing)) if z > 1 else 0.0
    overlapped = max(math_s, memory_s, *comms.values())
    weights = shape.dense_parameters / (y * z) + shape.expert_parameters / (y * e * z)
    held = shape.weight_bytes * weights + kv_bytes * z
    return LayoutTime(
        layout=layout,
        microbatches=z,
        math_s=math_s,
        memory_s=memory_s,
        comms_s=comms,
        fixed_s=fixed,
        overlapped_s=overlapped,
        bytes_per_gpu=held,
        fits=held <= hardware.chip.hbm_bytes,
        tokens_per_s=sequences / (overlapped + fixed),
        why=_why(hardware, math_s, memory_s, comms, 0.0, held),
    )


def _exchange(shape: Shape, hardware: Hardware, array_bytes: float, tp: int, ep: int) -> dict[str, float]:
    """Return the seconds, at each network level, to send a replica's rows to their experts, or to send the results
    back.
    """
    if ep == 1:
        return {}
    return exchange_seconds(array_bytes, hardware.levels(tp * ep), shape.active, shape.router_nodes)


def _tensor_seconds(hardware: Hardware, gather: dict[str, float], ways: int) -> dict[str, float]:
    """Return the seconds, at each network level, of a layer's tensor-parallel communication, in the faster of two ways.
    `gather` has the seconds of one gather.

    One way has two gathers and two scatters. The other way, for few tokens, exchanges whole partial
    sums twice: each exchange moves `ways` times as much data as a gather, but the layer needs only
    half as many hops.
    """
    lowerings = (
        _with_hops(hardware, gather, _GATHERS_PER_LAYER, _GATHERS_PER_LAYER),
        _with_hops(hardware, gather, 2 * ways, 2),
    )
    return min(lowerings, key=lambda seconds: max(seconds.values(), default=0.0))


def _with_hops(hardware: Hardware, seconds: dict[str, float], transfers: int, hops: int) -> dict[str, float]:
    return {name: s * transfers + hops * _hop_s(hardware, name) for name, s in seconds.items()}


def _train_bytes(shape: Shape, layout: Layout, tokens: float) -> float:
    """The bytes in use on one GPU while `tokens` tokens of its replica are between the forward and backward pass."""
    inside, replicas = layout.tp * layout.pp, layout.dp * layout.ep
    total = _BF16 * tokens * shape.hidden * ceil(shape.layers / layout.pp) / layout.tp
    groups = ((shape.dense_parameters / inside, replicas), (shape.expert_parameters / (inside * layout.ep), layout.dp))
    for held, copies in groups:
        total += WEIGHT_BYTES * held / (copies if layout.zero == 3 else 1)
        total += OPTIMIZER_BYTES * held / (copies if layout.zero else 1)
    return total


def _stage_bytes_per_s(hardware: Hardware, stage_gpus: int, gpus: int) -> float:
    """The rate from one pipeline stage to the next. Inside a node, it is the rate of the GPUs' links;
    between nodes, it is the rate of their network cards.
    """
    inside = stage_gpus < hardware.node.gpus or gpus <= hardware.node.gpus
    per_gpu = hardware.link.egress_bytes_per_s if inside else hardware.node.nic_bytes_per_s_per_gpu
    return stage_gpus * per_gpu


def _hop_s(hardware: Hardware, level: str) -> float:
    if hardware.costs is None:
        return 0.0
    return hardware.costs.node_hop_s if level == "node" else hardware.costs.scale_out_hop_s


def _added(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}


def _times(a: dict[str, float], factor: float) -> dict[str, float]:
    return {key: value * factor for key, value in a.items()}


def _why(
    hardware: Hardware, math_s: float, memory_s: float, comms: dict[str, float], bubble: float, held: float
) -> str:
    """Return one line that says why the layout does not fit, or what takes the most time."""
    if held > hardware.chip.hbm_bytes:
        return f"needs {held / 1e9:.1f} GB of {hardware.chip.hbm_bytes / 1e9:.0f} GB per GPU"
    times = {"arithmetic": math_s, "memory": memory_s} | {f"the {name} network": s for name, s in comms.items()}
    longest = max(times, key=lambda name: times[name])
    rest = sorted((s for name, s in times.items() if name != longest), reverse=True)
    ahead = f" ({times[longest] / rest[0]:.1f} x the next)" if rest and rest[0] > 0 else ""
    bubbles = f", bubbles {bubble:.0%}" if bubble else ""
    return f"bound by {longest}{ahead}{bubbles}"


def pipeline_comms_s(tokens: float, model: int, microbatches: int, stages: int, bytes_per_s: float) -> float:
    """The seconds that hops between pipeline stages add to a pass. A pass has N_mb + N_stages - 2
    hops, one after the other, for N_mb microbatches.

    Each hop sends a microbatch's activations to the next stage, which takes 2 B D / (W N_mb)
    seconds, with B = `tokens`, D = `model` and W = `bytes_per_s`.
    """
    return (microbatches + stages - 2) * 2.0 * tokens * model / (bytes_per_s * microbatches)


def bubble_fraction(stages: int, microbatches: int) -> float:
    """The fraction of a pass in which a stage is idle, with s stages, m microbatches and the simple schedule:
    (s - 1) / (m + s - 1).
    """
    return (stages - 1) / (microbatches + stages - 1)
