"""The formulas of a book that no verb of the program reaches, for the questions that the book asks.

Austin et al., *How to Scale Your Model*, "How to Think About GPUs" (2025), written exactly, with the (N - 1) / N that
the text drops; docs/roofline.md says where the two differ. What plans, layouts and steps are priced with stands in
megakernel/roofline. `array_bytes` is a whole array, all shards together; rates of links are one direction. `alpha` is
FLOP/s / collective bytes/s, of an MLP x[B, D] W_in[D, F] W_out[F, D] in bf16: backward of a layer takes 8 B D F FLOPs,
forward 4 B D F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from megakernel.machine import Chip, Hardware, Level
from megakernel.roofline.collectives import all_to_all_s
from megakernel.roofline.kernels import OPERAND_BYTES
from megakernel.roofline.layout import OPTIMIZER_BYTES, WEIGHT_BYTES

# -- chips


def smem_bytes(chip: Chip) -> float:
    return chip.sms * chip.smem_bytes_per_sm


def register_bytes(chip: Chip) -> float:
    return float(chip.sms * chip.registers_per_sm * 4)


def vector_ops_per_s(chip: Chip, clock_hz: float) -> float:
    """fp32 operations per second when each is one instruction, no multiply-adds."""
    return chip.fp32_lanes * clock_hz


def resident_warps(chip: Chip, registers_per_thread: int) -> int:
    """Warps that fit on an SM when each thread has so many registers."""
    return min(chip.warps_per_sm, chip.registers_per_sm // (registers_per_thread * chip.threads_per_warp))


def sms_filled(chip: Chip, elements: int) -> int:
    """SMs that have work when each lane takes one element."""
    return min(chip.sms, ceil(elements / (chip.fp32_lanes // chip.sms)))


def tensor_flops_per_cycle(chip: Chip, flops_per_s: float, clock_hz: float) -> int:
    """FLOPs of one tensor core in one cycle: the power of two nearest to peak / cores / clock.

    Peaks are quoted at clocks that the tables do not give exactly; the hardware's figure is a power of two.
    """
    return 1 << round(log2(flops_per_s / chip.subpartitions / clock_hz))


# -- time that one kernel must take on one chip


@dataclass(frozen=True)
class KernelTime:
    """Seconds of the two, which overlap; `bound` names the longer."""

    flops: float
    bytes: float
    math_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.math_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "math" if self.math_s > self.memory_s else "memory"

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.bytes


def matmul(hardware: Hardware, rows: int, inner: int, cols: int, dtype: str = "bf16") -> KernelTime:
    """[rows, inner] x [inner, cols]: both operands read and the result written once, in `dtype`."""
    flops = 2.0 * rows * inner * cols
    moved = OPERAND_BYTES[dtype] * (rows * inner + inner * cols + rows * cols)
    return KernelTime(flops, moved, flops / hardware.flops_per_s(dtype), moved / hardware.chip.hbm_bytes_per_s)


def vector_add(hardware: Hardware, elements: int, clock_hz: float) -> KernelTime:
    """Sum of two fp32 vectors: an operation per element, two reads and a write. Only SMs with elements compute."""
    chip = hardware.chip
    filled = sms_filled(chip, elements) / chip.sms
    moved = 3 * OPERAND_BYTES["fp32"] * elements
    math_s = elements / (vector_ops_per_s(chip, clock_hz) * filled)
    return KernelTime(float(elements), moved, math_s, moved / chip.hbm_bytes_per_s)


def weight_pass_s(weight_bytes: float, bytes_per_s: float) -> float:
    """Seconds to bring all weights once over a link, as each pass of a model whose weights are offloaded must."""
    return weight_bytes / bytes_per_s


# -- collectives


def all_gather_s(array_bytes: float, members: int, egress_bytes_per_s: float) -> float:
    """B (N - 1) / (N W): each member gets what the others have. A reduce-scatter takes as long."""
    return array_bytes * (members - 1) / (members * egress_bytes_per_s)


def all_reduce_s(array_bytes: float, members: int, egress_bytes_per_s: float, *, in_network: bool = False) -> float:
    """A reduce-scatter and an all-gather; B / W where the switch adds, since each member sends and gets B once."""
    if in_network:
        return array_bytes / egress_bytes_per_s
    return 2 * all_gather_s(array_bytes, members, egress_bytes_per_s)


def sparse_all_to_all_s(array_bytes: float, members: int, egress_bytes_per_s: float, nonzero: float) -> float:
    """An all-to-all times `nonzero` / N: only so many of a member's N shards hold anything."""
    return all_to_all_s(array_bytes, members, egress_bytes_per_s) * min(nonzero / members, 1.0)


def torus_all_to_all_s(array_bytes: float, link_bytes_per_s: float) -> float:
    """B / 4 W on a bidirectional ring of a TPU's torus."""
    return array_bytes / (4 * link_bytes_per_s)


def sparse_share(members: int, chosen: int) -> tuple[float, float]:
    """(expected, approximate) part of B / W that a member sends when each token goes to `chosen` of `members`.

    Expected, choices independent and uniform: (1 - ((Z - 1) / Z)^K) (Z - 1) / Z. Approximate: min(K / Z, 1) in place of
    the first factor.
    """
    away = (members - 1) / members
    return (1 - away**chosen) * away, min(chosen / members, 1.0) * away


def level_seconds(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> tuple[float, ...]:
    """Seconds that each level of an all-gather (or reduce-scatter) takes, innermost first; the largest counts.

    B (D - 1) S / (D max(Y, S) W): degree D, S GPUs below a child whose link is W, and Y = `inner` ways in which another
    axis shards the array already.
    """
    return tuple(
        array_bytes
        * (level.degree - 1)
        * level.child_gpus
        / (level.degree * max(inner, level.child_gpus) * level.child_bytes_per_s)
        for level in levels
    )


def levels_all_gather_s(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> float:
    """An all-gather or reduce-scatter over all levels, pipelined, so the slowest level's time."""
    return max(level_seconds(array_bytes, levels, inner), default=0.0)


def levels_all_reduce_s(
    array_bytes: float, levels: Sequence[Level], inner: int = 1, *, in_network: bool = False
) -> float:
    """Twice an all-gather; where switches add, each child's link carries its share once each way."""
    if not in_network:
        return 2 * levels_all_gather_s(array_bytes, levels, inner)
    shares = (array_bytes * x.child_gpus / (max(inner, x.child_gpus) * x.child_bytes_per_s) for x in levels)
    return max(shares, default=0.0)


def switch_bytes(array_bytes: float, members: int, operation: str) -> tuple[float, float]:
    """(in, out) bytes of one node's switch, all ports together, for the operation within the node.

    A gather takes each shard in once and hands the whole to each member; a reduction in the switch takes the whole of
    each member in and hands the sum to each.
    """
    taken = array_bytes if operation == "all_gather" else array_bytes * members
    return taken, array_bytes * members


def ring_hops(members: int) -> int:
    """Hops of a reduce-scatter or all-gather around a ring."""
    return members - 1


def tree_hops(members: int) -> int:
    """Hops of a reduction along a binary tree: the whole part above log2 N."""
    return (members - 1).bit_length()


# -- how far each kind of parallelism goes before its communication takes longer than its arithmetic


@dataclass(frozen=True)
class Times:
    """Arithmetic against communication, which overlap."""

    math_s: float
    comms_s: float

    @property
    def compute_bound(self) -> bool:
        return self.math_s > self.comms_s


def alpha_node(hardware: Hardware, dtype: str = "bf16") -> float:
    """FLOPs per byte of a GPU's egress inside the node."""
    return hardware.flops_per_s(dtype) / hardware.link.egress_bytes_per_s


def alpha_beyond(hardware: Hardware, dtype: str = "bf16") -> float:
    """FLOPs of one GPU per byte of its node's egress: a collective beyond the node moves an array once per node."""
    return hardware.flops_per_s(dtype) / hardware.node.egress_bytes_per_s


def data_parallel(
    tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float, *, exact: bool = False
) -> Times:
    """Backward of one layer over `members`: 8 B D F / (X C) against 8 D F / W (gather weights, scatter gradients)."""
    share = (members - 1) / members if exact else 1.0
    return Times(8.0 * tokens * model * ffn / (members * flops_per_s), 8.0 * model * ffn / bytes_per_s * share)


def data_critical_tokens(
    alpha: float, *, groups: int | None = None, inner: float = 1.0, experts: int = 1, active: int = 1
) -> float:
    """Tokens per GPU above which data parallelism (or ZeRO) is bound by arithmetic: alpha (X - 1) / X E / k.

    `groups`: members at the level that binds, None for many. `inner`: times its bandwidth grows because the parameters
    are already sharded, over so many children.
    """
    share = 1.0 if groups is None else (groups - 1) / groups
    return alpha * share / inner * experts / active


def tensor_parallel(tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float) -> Times:
    """Forward of one layer: 4 B D F / (Y C) against 4 B D / W (gather the inputs, scatter the outputs)."""
    return Times(4.0 * tokens * model * ffn / (members * flops_per_s), 4.0 * tokens * model / bytes_per_s)


def tensor_limit(ffn: int, alpha: float) -> float:
    """Ways of tensor parallelism up to which a layer is bound by arithmetic: F / alpha."""
    return ffn / alpha


def tensor_limit_two_nodes(ffn: int, alpha: float, node_gpus: int) -> float:
    """The same over exactly two nodes: F > alpha (Y - 8)."""
    return ffn / alpha + node_gpus


def expert_parallel(
    tokens: float,
    model: int,
    ffn: int,
    active: int,
    members: int,
    flops_per_s: float,
    node_bytes_per_s: float,
    node_gpus: int,
) -> Times:
    """Forward over `members` on several nodes: 4 B k D F / (Z C) against two sparse all-to-alls.

    4 B D (Z - 8) / (W Z) min(8 k / Z, 1): a token's row goes to at most k of Z / 8 nodes.
    """
    sparse = min(node_gpus * active / members, 1.0)
    moved = 4.0 * tokens * model * (members - node_gpus) / (node_bytes_per_s * members) * sparse
    return Times(4.0 * tokens * active * model * ffn / (members * flops_per_s), moved)


def expert_limit(ffn: int, active: int, members: int, alpha: float, node_gpus: int) -> bool:
    """Whether expert parallelism over `members` is bound by arithmetic.

    Dense exchange (k > Z / 8): F > alpha (Z - 8) / k. Sparse: F > 8 alpha (Z - 8) / Z, which is F > 8 alpha for many.
    """
    if active * node_gpus > members:
        return ffn > alpha * (members - node_gpus) / active
    return ffn > node_gpus * alpha * (members - node_gpus) / members


def pipeline_comms_per_layer_s(tokens: float, model: int, layers: int, bytes_per_s: float) -> float:
    """About 1.5 x 2 B D / (W N_layers), with as many microbatches as the bubble asks for."""
    return 1.5 * 2.0 * tokens * model / (bytes_per_s * layers)


# -- training


STATE_BYTES = WEIGHT_BYTES + OPTIMIZER_BYTES  # per parameter
FLOPS_PER_PARAMETER_AND_TOKEN = 6.0  # forward 2, backward 4
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class Run:
    """A whole training run."""

    flops: float
    flops_per_s: float

    @property
    def seconds(self) -> float:
        return self.flops / self.flops_per_s

    @property
    def days(self) -> float:
        return self.seconds / SECONDS_PER_DAY


def state_bytes(parameters: float) -> float:
    """Weights and optimizer of a model, 10 bytes per parameter; gradients and activations not counted."""
    return STATE_BYTES * parameters


def gpus_to_hold(size_bytes: float, hardware: Hardware) -> int:
    """GPUs whose memory together holds so much."""
    return ceil(size_bytes / hardware.chip.hbm_bytes)


def training_run(parameters: float, tokens: float, gpus: int, hardware: Hardware, utilisation: float) -> Run:
    """6 P T FLOPs at `utilisation` of the bf16 peak."""
    return Run(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens, gpus * hardware.flops_per_s("bf16") * utilisation)


def tokens_per_gpu(sequences: int, sequence_tokens: int, gpus: int) -> float:
    """Of one batch."""
    return sequences * sequence_tokens / gpus
