"""The formulas of a book about GPUs, with the inputs of the book's questions. `ask` uses them.

The formulas are those of Austin et al., *How to Scale Your Model*, "How to Think About GPUs"
(2025), written exactly, with the (N - 1) / N that the text drops; docs/roofline.md lists the
differences. `array_bytes` is a whole array, all shards together. Link rates are in one direction.
`alpha` is FLOP/s / collective bytes/s. The model layer is an MLP x[B, D] W_in[D, F] W_out[F, D] in
bf16: its backward pass takes 8 B D F FLOPs and its forward pass 4 B D F. X, Y and Z GPUs share a
layer by data, tensor and expert parallelism. C is a GPU's FLOP/s and W the bytes/s of a link.
In "a against b", a is seconds of arithmetic and b seconds of communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from ..errors import MegakernelError
from ..machine import OPERAND_BYTES, Chip, Hardware, Level

# Figures that no estimate for a program uses: the book's anatomy of an SM, its table of GPUs, and
# its measurement of an in-network all-reduce. Links are from DGX datasheets, those of hosts also
# from the datasheets of GH200 and GB200.
REGISTERS_PER_SM, WARPS_PER_SM, THREADS_PER_WARP = 65536, 64, 32
# Per SM: bytes of shared memory and L1 together, and 32-bit registers.
ON_CHIP = {"h100": (262144, REGISTERS_PER_SM), "tpu-v5p": (64e6, 32768)}
MOST_REGISTERS = 256  # of a thread, as the book counts them
IN_NETWORK_ON, H100_IN_NETWORK_BUS_BYTES_PER_S = "h100", 480e9
HOST_LINK_BYTES_PER_S = {"h100": 64e9, "gh200": 450e9, "gb200-nvl72": 900e9}
# The switches of NVIDIA's SuperPOD reference designs. For GB200, as many leaves as full bisection requires.
LEAF_SWITCHES_PER_UNIT = {"h100": 8, "b200": 8, "gb200-nvl72": 18}
SWITCH_PORTS, SWITCH_PORT_BYTES_PER_S = 64, 50e9
# How a GPU's links are distributed over the switches of its node.
LINKS_PER_SWITCH = {
    "a100": (2,) * 6,
    "h100": (5, 4, 4, 5),
    "h800": (3,) * 4,
    "b200": (9, 9),
    "gb200-nvl72": (1,) * 18,
}


_T = TypeVar("_T")


@dataclass(frozen=True)
class Times:
    """Seconds of arithmetic and seconds of moving its data. The two overlap."""

    math_s: float
    moving_s: float

    @property
    def seconds(self) -> float:
        return max(self.math_s, self.moving_s)

    @property
    def math_binds(self) -> bool:
        return self.math_s > self.moving_s


# -- one chip


def _known(table: Mapping[str, _T], hardware: Hardware, what: str) -> _T:
    """A figure of a machine, or an error if it is unknown."""
    if hardware.name not in table:
        raise MegakernelError(f"{what} of {hardware.name} is not known: use --machine {' or '.join(table)}")
    return table[hardware.name]


def on_chip_bytes(hardware: Hardware) -> tuple[float, float]:
    """The bytes of shared memory and of registers."""
    smem, registers = _known(ON_CHIP, hardware, "the memory on the chip")
    return hardware.chip.sms * smem, hardware.chip.sms * registers * 4.0


def vector_ops_per_s(chip: Chip, clock_hz: float) -> float:
    """fp32 operations per second if each is one instruction, without multiply-adds."""
    return chip.fp32_lanes * clock_hz


def matmul(hardware: Hardware, rows: int, inner: int, cols: int, dtype: str = "bf16") -> Times:
    """[rows, inner] x [inner, cols]: both operands are read and the result, of the same type, is written once."""
    moved = OPERAND_BYTES[dtype] * (rows * inner + inner * cols + rows * cols)
    math_s = 2.0 * rows * inner * cols / hardware.flops_per_s(dtype)
    return Times(math_s, moved / hardware.chip.hbm_bytes_per_s)


def vector_add(hardware: Hardware, elements: int, clock_hz: float) -> Times:
    """The sum of two fp32 vectors: one operation, two reads and one write per element. Only SMs that have elements
    compute.
    """
    chip = hardware.chip
    filled = min(chip.sms, ceil(elements / (chip.fp32_lanes // chip.sms))) / chip.sms
    math_s = elements / (vector_ops_per_s(chip, clock_hz) * filled)
    return Times(math_s, 3 * OPERAND_BYTES["fp32"] * elements / chip.hbm_bytes_per_s)


# -- collectives


def level_seconds(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """The seconds that each level of an all-gather (or reduce-scatter) takes, innermost first; the
    slowest level determines the time.

    B (D - 1) S / (D max(Y, S) W): an array of B bytes, degree D, S GPUs below a child whose link
    has the rate W, and Y = `inner` shards along another axis.
    """
    shares = level_shares(array_bytes, levels, inner)
    return [share * (level.degree - 1) / level.degree for share, level in zip(shares, levels, strict=True)]


def level_shares(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """The seconds of an all-reduce with in-network reduction, per level: each child's link carries
    its share once in each direction.
    """
    return [array_bytes * x.child_gpus / (max(inner, x.child_gpus) * x.child_bytes_per_s) for x in levels]


def level_bytes_per_s(level: Level) -> float:
    """The rate of all children's links together."""
    return level.degree * level.child_bytes_per_s


# -- how far each kind of parallelism goes before its communication takes longer than its arithmetic


def host_pass_s(hardware: Hardware, read_bytes: float) -> float:
    """The seconds to read weights in the host's memory once over its link to the GPU."""
    return read_bytes / _known(HOST_LINK_BYTES_PER_S, hardware, "the link to the host")


def resident_warps(registers_per_thread: int) -> int:
    """The number of warps that an SM can hold at once."""
    return min(WARPS_PER_SM, REGISTERS_PER_SM // (registers_per_thread * THREADS_PER_WARP))


def spread(experts: int, active: int) -> tuple[float, float]:
    """The expected fraction of Z GPUs, each with one expert, that receive a token of another GPU:
    exact, and approximate.

    A token chooses k experts at random: (1 - (1 - 1/Z)^k) (1 - 1/Z), and min(k/Z, 1) (1 - 1/Z).
    """
    away = 1 - 1 / experts
    return (1 - away**active) * away, min(active / experts, 1.0) * away


def alpha_node(hardware: Hardware) -> float:
    """The FLOPs that a GPU can do per byte that it sends inside the node."""
    return hardware.flops_per_s("bf16") / hardware.link.egress_bytes_per_s


def alpha_beyond(hardware: Hardware) -> float:
    """The FLOPs that one GPU can do per byte that its node sends: a collective beyond the node moves an array only once
    per node.
    """
    return hardware.flops_per_s("bf16") / hardware.node.egress_bytes_per_s


def data_parallel(
    tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float, *, exact: bool = False
) -> Times:
    """The backward pass of one layer over `members`: 8 B D F / (X C) against 8 D F / W (gather weights, scatter
    gradients).
    """
    share = (members - 1) / members if exact else 1.0
    return Times(8.0 * tokens * model * ffn / (members * flops_per_s), 8.0 * model * ffn / bytes_per_s * share)


def tensor_parallel(tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float) -> Times:
    """The forward pass of one layer: 4 B D F / (Y C) against 4 B D / W (gather the inputs, scatter the outputs)."""
    return Times(4.0 * tokens * model * ffn / (members * flops_per_s), 4.0 * tokens * model / bytes_per_s)


def expert_parallel(hardware: Hardware, tokens: float, model: int, ffn: int, active: int, members: int) -> Times:
    """The forward pass over `members` on several nodes of S GPUs: 4 B k D F / (Z C) against two sparse all-to-alls.

    4 B D (Z - S) / (W Z) min(S k / Z, 1): a token's row is sent to at most k of Z / S nodes.
    """
    gpus = hardware.node.gpus
    moved = 4.0 * tokens * model * (members - gpus) / (hardware.node.egress_bytes_per_s * members)
    math_s = 4.0 * tokens * active * model * ffn / (members * hardware.flops_per_s("bf16"))
    return Times(math_s, moved * min(gpus * active / members, 1.0))


@dataclass(frozen=True)
class Parts:
    """The components of a cluster."""

    nodes: int
    units: int
    node_switches: int
    leaf_switches: int
    spine_switches: int
    core_switches: int
    links_per_leaf_and_spine: float  # cables between each pair of them

    @property
    def switches(self) -> int:
        return self.node_switches + self.leaf_switches + self.spine_switches + self.core_switches


def parts(hardware: Hardware, gpus: int) -> Parts:
    """The switches of a fat tree with full bisection over whole units.

    Half of each leaf's ports go down and half go up. Two levels suffice while a spine switch has a port for each leaf.
    Beyond that, half of each spine switch's ports also go up, to a core layer.
    """
    fabric, per_node = hardware.fabric, hardware.node.gpus
    if fabric is None:
        raise MegakernelError(f"the network between nodes of {hardware.name} is not described")
    nodes = ceil(gpus / per_node)
    units = ceil(nodes / fabric.nodes_per_unit)
    leaves = units * _known(LEAF_SWITCHES_PER_UNIT, hardware, "the number of leaf switches")
    cables = leaves * SWITCH_PORTS // 2
    if units == 1:
        return Parts(nodes, units, nodes * hardware.node.switches, leaves, 0, 0, 0.0)
    core = cables // SWITCH_PORTS if leaves > SWITCH_PORTS else 0
    spines = cables // SWITCH_PORTS + core
    return Parts(nodes, units, nodes * hardware.node.switches, leaves, spines, core, SWITCH_PORTS / 2 / spines)
