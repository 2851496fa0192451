"""Formulas from a book about GPUs, as functions of the inputs of the book's questions. `questions` uses them.

The book is Austin et al., *How to Scale Your Model*, "How to Think About GPUs" (2025). The formulas here are exact:
they keep the factor (N - 1) / N that the book drops. docs/roofline.md lists the differences. Names and symbols:

array_bytes  size of a whole array, all shards together
alpha        FLOP/s of a GPU, divided by the bytes/s of a collective
B, D, F      sizes of the model layer, an MLP x[B, D] W_in[D, F] W_out[F, D] in bf16. The layer's forward pass takes
             4 B D F FLOPs, and its backward pass 8 B D F
X, Y, Z      number of GPUs that share a layer by data, tensor and expert parallelism
C            FLOP/s of a GPU
W            bytes/s of a link in one direction
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from ...errors import MegakernelError
from ...machine import OPERAND_BYTES, Chip, Hardware, Level

# Figures that only the book's questions need: the parts of an SM, the book's table of GPUs, and the book's measurement
# of an in-network all-reduce. Link rates are from the datasheets of DGX, GH200 and GB200.
REGISTERS_PER_SM, WARPS_PER_SM, THREADS_PER_WARP = 65536, 64, 32
# For each SM: the bytes of shared memory and L1 together, and the number of 32-bit registers.
ON_CHIP = {"h100": (262144, REGISTERS_PER_SM), "tpu-v5p": (64e6, 32768)}
MOST_REGISTERS = 256  # the maximum number of registers of one thread, according to the book
IN_NETWORK_ON, H100_IN_NETWORK_BUS_BYTES_PER_S = "h100", 480e9
HOST_LINK_BYTES_PER_S = {"h100": 64e9, "gh200": 450e9, "gb200-nvl72": 900e9}
# The number of leaf switches in a scalable unit of NVIDIA's SuperPOD reference designs. The number for GB200 is
# the one that full bisection bandwidth requires.
LEAF_SWITCHES_PER_UNIT = {"h100": 8, "b200": 8, "gb200-nvl72": 18}
SWITCH_PORTS, SWITCH_PORT_BYTES_PER_S = 64, 50e9
# How many of a GPU's links go to each switch of its node.
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
    """The seconds that arithmetic takes, and the seconds that moving its data takes. Arithmetic and moving overlap."""

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
    """Return the machine's figure in `table`. Raises MegakernelError if there is none; `what` describes the figure."""
    if hardware.name not in table:
        raise MegakernelError(f"{what} of {hardware.name} is not known: use --machine {' or '.join(table)}")
    return table[hardware.name]


def on_chip_bytes(hardware: Hardware) -> tuple[float, float]:
    """Return the bytes of shared memory and the bytes of registers on a whole chip."""
    smem, registers = _known(ON_CHIP, hardware, "the memory on the chip")
    return hardware.chip.sms * smem, hardware.chip.sms * registers * 4.0


def vector_ops_per_s(chip: Chip, clock_hz: float) -> float:
    """The fp32 operations per second of a chip if each operation is one instruction, without multiply-adds."""
    return chip.fp32_lanes * clock_hz


def matmul(hardware: Hardware, rows: int, inner: int, cols: int, dtype: str = "bf16") -> Times:
    """Return the times of the matmul [rows, inner] x [inner, cols]. Both operands are read once, and the result, which
    has the same type, is written once.
    """
    moved = OPERAND_BYTES[dtype] * (rows * inner + inner * cols + rows * cols)
    math_s = 2.0 * rows * inner * cols / hardware.flops_per_s(dtype)
    return Times(math_s, moved / hardware.chip.hbm_bytes_per_s)


def vector_add(hardware: Hardware, elements: int, clock_hz: float) -> Times:
    """Return the times of the sum of two fp32 vectors, with one operation, two reads and one write per element. If
    there are few elements, only some of the SMs compute.
    """
    chip = hardware.chip
    filled = min(chip.sms, ceil(elements / (chip.fp32_lanes // chip.sms))) / chip.sms
    math_s = elements / (vector_ops_per_s(chip, clock_hz) * filled)
    return Times(math_s, 3 * OPERAND_BYTES["fp32"] * elements / chip.hbm_bytes_per_s)


# -- collectives


def level_seconds(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """Return the seconds that each network level of an all-gather (or reduce-scatter) takes,
    innermost level first. The slowest level determines the time of the collective.

    A level connects D children (GPUs, or groups of GPUs). Each child has S GPUs and a link of
    W bytes/s. The level takes B (D - 1) S / (D max(Y, S) W) seconds, where B is `array_bytes`, and
    Y = `inner` is the number of shards along another axis.
    """
    shares = level_shares(array_bytes, levels, inner)
    return [share * (level.degree - 1) / level.degree for share, level in zip(shares, levels, strict=True)]


def level_shares(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """Return the seconds that each network level of an all-reduce with in-network reduction takes.

    The link of each child (see `level_seconds`) carries the child's share of the array once in each
    direction.
    """
    return [array_bytes * x.child_gpus / (max(inner, x.child_gpus) * x.child_bytes_per_s) for x in levels]


def level_bytes_per_s(level: Level) -> float:
    """The bytes per second of the links of all children of a network level together."""
    return level.degree * level.child_bytes_per_s


# -- how far each kind of parallelism goes before its communication takes longer than its arithmetic


def host_pass_s(hardware: Hardware, read_bytes: float) -> float:
    """The seconds to read weights in the host's memory once over its link to the GPU."""
    return read_bytes / _known(HOST_LINK_BYTES_PER_S, hardware, "the link to the host")


def resident_warps(registers_per_thread: int) -> int:
    """The number of warps that an SM can hold at once if each thread uses this number of registers."""
    return min(WARPS_PER_SM, REGISTERS_PER_SM // (registers_per_thread * THREADS_PER_WARP))


def spread(experts: int, active: int) -> tuple[float, float]:
    """Return the expected fraction of the GPUs that receive a given token from another GPU: first
    the exact value, then an approximation.

    Z = `experts` GPUs have one expert each, and the token chooses k = `active` experts at random.
    The exact value is (1 - (1 - 1/Z)^k) (1 - 1/Z). The approximation is min(k/Z, 1) (1 - 1/Z).
    """
    away = 1 - 1 / experts
    return (1 - away**active) * away, min(active / experts, 1.0) * away


def alpha_node(hardware: Hardware) -> float:
    """The number of FLOPs that a GPU can do per byte that it sends inside the node."""
    return hardware.flops_per_s("bf16") / hardware.link.egress_bytes_per_s


def alpha_beyond(hardware: Hardware) -> float:
    """The number of FLOPs that one GPU can do while its node sends a byte to other nodes.

    The rate is that of the whole node, because a collective over several nodes sends an array only once per node.
    """
    return hardware.flops_per_s("bf16") / hardware.node.egress_bytes_per_s


def data_parallel(tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float) -> Times:
    """Return the times of the backward pass of one layer over X = `members` data-parallel GPUs: 8 B D F / (X C) seconds
    of arithmetic, and 8 D F / W seconds to gather weights and scatter gradients. B is `tokens`, D is `model`, F is
    `ffn`, C is `flops_per_s`, and W is `bytes_per_s`.
    """
    return Times(8.0 * tokens * model * ffn / (members * flops_per_s), 8.0 * model * ffn / bytes_per_s)


def tensor_parallel(tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float) -> Times:
    """Return the times of the forward pass of one layer over Y = `members` tensor-parallel GPUs: 4 B D F / (Y C)
    seconds of arithmetic, and 4 B D / W seconds to gather the inputs and scatter the outputs. B is `tokens`, D is
    `model`, F is `ffn`, C is `flops_per_s`, and W is `bytes_per_s`.
    """
    return Times(4.0 * tokens * model * ffn / (members * flops_per_s), 4.0 * tokens * model / bytes_per_s)


def expert_parallel(hardware: Hardware, tokens: float, model: int, ffn: int, active: int, members: int) -> Times:
    """Return the times of the forward pass of one layer over Z = `members` expert-parallel GPUs, on several nodes of S
    GPUs. The arithmetic takes 4 B k D F / (Z C) seconds, with B = `tokens`, D = `model`, F = `ffn`, k = `active`
    experts per token, and C FLOP/s per GPU.

    The communication is two sparse all-to-alls, which take 4 B D (Z - S) / (W Z) min(S k / Z, 1) seconds, with W
    bytes/s out of a node. The minimum is there because a token's row is sent to at most k of the Z / S nodes.
    """
    gpus = hardware.node.gpus
    moved = 4.0 * tokens * model * (members - gpus) / (hardware.node.egress_bytes_per_s * members)
    math_s = 4.0 * tokens * active * model * ffn / (members * hardware.flops_per_s("bf16"))
    return Times(math_s, moved * min(gpus * active / members, 1.0))


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


@dataclass(frozen=True)
class Parts:
    """The components of a cluster."""

    nodes: int
    units: int
    node_switches: int
    leaf_switches: int
    spine_switches: int
    core_switches: int
    links_per_leaf_and_spine: float  # the number of cables between each leaf switch and each spine switch

    @property
    def switches(self) -> int:
        return self.node_switches + self.leaf_switches + self.spine_switches + self.core_switches


def parts(hardware: Hardware, gpus: int) -> Parts:
    """Return the switches of a fat tree with full bisection bandwidth for this number of GPUs.

    The network is built from whole SuperPOD units.

    Half of each leaf switch's ports go down, and half go up to spine switches. These two levels suffice if a spine
    switch has a port for each leaf switch. Otherwise, half of each spine switch's ports go up to a core layer.
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
