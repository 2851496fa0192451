"""Describes hardware: chips, links, nodes and networks, and the costs of synchronisation.

The name of a number ends in its unit. Rates are per second; those of links are in one direction. FLOP rates are for
dense matrices and count a multiply-add as two. The numbers, with a source for each, are in `known/*.toml`.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct, field

from ..errors import MegakernelError

# The limits of numbers in machine files. Whole numbers count SMs, links or rows; they are at most 2^16, because a trace
# stores the number of an SM in 16 bits. All other numbers are limited so that their products do not overflow.
Count = Annotated[int, Meta(ge=1, le=1 << 16)]
Number = Annotated[float, Meta(ge=1e-30, le=1e30)]
Cycles = Annotated[tuple[Annotated[float, Meta(ge=0, le=1e30)], ...], Meta(min_length=1, max_length=6)]
ONE_ROW = "row_"
_ONCE_A_STEP = ("other", "end_logits")  # paths (parts of the machine code) that run once a step, in no layer


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A section of a machine file, with the names of its figures."""


class Chip(_Section, frozen=True):
    """One processor, in terms of a GPU. The machine file of a TPU says which part of the TPU each term stands for."""

    generation: str
    sms: Count
    subpartitions_per_sm: Count  # each subpartition has a tensor core and a warp scheduler
    fp32_lanes_per_subpartition: Count
    hbm_bytes: Number
    hbm_bytes_per_s: Number
    boost_clock_hz: Number | None = None
    l2_bytes: Number = 0.0
    l2_bytes_per_clock: Number = 0.0  # bytes per clock that each SM loads from L2 while all SMs load; measured
    load_bytes_per_clock: Number = 0.0  # maximum bytes per clock that one SM loads
    usd_per_hour: Number | None = None  # a list price

    @property
    def subpartitions(self) -> int:
        return self.sms * self.subpartitions_per_sm

    @property
    def fp32_lanes(self) -> int:
        return self.subpartitions * self.fp32_lanes_per_subpartition


# The bytes of one operand of a multiply-add, by the operand's type.
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "fp32": 4.0}


class Rates(_Section, frozen=True):
    """FLOP/s of the matrix unit by operand type; None: not supported. Without fp8, `fp8` may be the int8 rate."""

    bf16: Number
    fp32: Number  # FLOP/s of float32 multiply-adds outside the matrix unit
    fp8: Number | None = None
    fp4: Number | None = None
    int8: Number | None = None  # operations per second on 8-bit integers, measured on a CPU


class Link(_Section, frozen=True):
    """The links of one chip to the other chips of its node: their number, and the rate of each in one direction."""

    ports: Count
    port_bytes_per_s: Number

    @property
    def egress_bytes_per_s(self) -> float:
        return self.ports * self.port_bytes_per_s


class Node(_Section, frozen=True):
    """GPUs that can send to each other at the full rate of their links (an NVLink domain)."""

    gpus: Count
    nic_bytes_per_s_per_gpu: Number  # rate at which each GPU sends to other nodes
    switches: Count = 0
    switch_ports: Count = 0
    # The network between nodes is a fat tree. This many nodes (a unit) share leaf switches, which have as many links to
    # spine switches as to nodes. 0: the network is not described.
    nodes_per_unit: Count = 0

    @property
    def egress_bytes_per_s(self) -> float:
        return self.gpus * self.nic_bytes_per_s_per_gpu


class Costs(_Section, frozen=True):
    """Latencies in seconds, without the time to move data."""

    stream_launch_s: Number  # time to launch an empty kernel
    signal_s: Number  # time from an instruction's signal until an SM that waits for it continues, under memory load
    dispatch_s: Number  # time to fetch and decode one instruction
    node_hop_s: Number  # time of a message between GPUs of a node, and of waiting for GPUs that are late
    scale_out_hop_s: Number  # time of a message between nodes


class Path(NamedTuple):
    """The seconds that a path (a part of the interpreter's machine code) takes. `cold` is the time of its first
    execution. `warm` is the time when its code and the tables that it reads are in the SM's caches."""

    cold: float
    warm: float
    accesses: bool = False  # whether it waits for L2


class Core(_Section, frozen=True):
    """Measured rates of one CPU core that runs this package's interpreter in bfloat16 while all other cores are idle.

    Arithmetic rates depend on the number of rows of a matmul tile, or on the number of (row, head) pairs of an
    attention item. They were measured for the numbers in `matmul_rows` and `attention_rows`. Between two such numbers,
    rates are interpolated linearly in log(rows).
    """

    memory_bytes_per_s: Number
    matmul_rows: tuple[Number, ...]
    matmul_flops_per_s: tuple[Number, ...]
    attention_rows: tuple[Number, ...]
    attention_flops_per_s: tuple[Number, ...]
    vector_flops_per_s: Number

    def __post_init__(self) -> None:
        _check_rates(self.matmul_rows, self.matmul_flops_per_s)
        _check_rates(self.attention_rows, self.attention_flops_per_s)


def _check_rates(points: tuple[float, ...], values: tuple[float, ...]) -> None:
    if not points or len(points) != len(values) or list(points) != sorted(set(points)):
        raise ValueError(f"the sizes {list(points)} must be in ascending order, and each size must have one rate")


class Tiles(_Section, frozen=True):
    """Sizes of tiles and pages that suit the interpreter on this machine."""

    rows: Count  # token rows of a matmul tile and of a row block
    cols: Count  # output columns of a matmul tile
    col_unit: Count  # column tiles start and end on multiples of this number of columns
    page: Count  # tokens per page of the KV cache
    target: Literal["cpu", "hopper"]  # the target that programs are compiled for
    pages: Count = 0  # shared-memory pages in the ring buffer through which a worker loads; 0 for a CPU core


class Curve(_Section, frozen=True):
    """Measured bandwidths of a collective over `gpus` GPUs of one node, for several message sizes. They are bus
    bandwidths as in NCCL's tests: the bytes that each GPU must send, divided by the time."""

    collective: str
    gpus: Count
    message_bytes: tuple[Number, ...]
    bus_bytes_per_s: tuple[Number, ...]

    def __post_init__(self) -> None:
        _check_rates(self.message_bytes, self.bus_bytes_per_s)

    def at(self, message_bytes: float) -> float:
        """Return the bytes/s for a message size, by interpolating logarithms. A message smaller than all measured ones
        takes as long as the smallest measured one."""
        if message_bytes <= self.message_bytes[0]:
            return self.bus_bytes_per_s[0] * message_bytes / self.message_bytes[0]
        return float(np.exp(np.interp(np.log(message_bytes), np.log(self.message_bytes), np.log(self.bus_bytes_per_s))))


class Level(Struct, frozen=True):
    """A level of a network. It connects `degree` children, each of which has `child_gpus` GPUs and its own link."""

    name: str
    degree: int
    child_gpus: int
    child_bytes_per_s: float


class Hardware(_Section, frozen=True):
    """A kind of machine: its chip, the node and network that connect chips, and the interpreter's costs on it. Its
    fields are the sections of a machine file."""

    name: str
    chip: Chip
    rates: Rates = field(name="flops_per_s")
    link: Link
    node: Node
    costs: Costs | None = None  # None: the machine is described only for comparisons
    tiles: Tiles | None = None
    paths: dict[str, Cycles] | None = None  # figures of parts of the machine code; known/_gpu.toml explains them
    core: Core | None = None  # the measured rates of a CPU core, if there are any
    curves: tuple[Curve, ...] = field(name="curve", default=())
    source: dict[str, list[str]] = field(default_factory=dict)  # for each source, the names of the values from it

    @property
    def clock_hz(self) -> float:
        """The boost clock in Hz. If it is unknown, it is derived from the float32 FLOP/s, 2 per lane."""
        return self.chip.boost_clock_hz or self.rates.fp32 / (2 * self.chip.fp32_lanes)

    @property
    def l2_bytes_per_s(self) -> float:
        """The bytes/s that all SMs together load from the L2 cache."""
        return self.chip.l2_bytes_per_clock * self.chip.sms * self.clock_hz

    def path_seconds(self) -> dict[str, Path] | None:
        """Return how long each path (a part of the interpreter's machine code) takes, or None if the machine file has
        no paths. Names with the prefix ONE_ROW belong to the interpreter's build for one token row. If a layer's code
        fits in the instruction cache, no time to fetch it is included, although the first layer fetches it once."""
        if self.paths is None:
            return None
        line, trip, found = self.paths["code_line"][0], self.paths["l2_trip"][0], {}
        cached, live = self.paths["code_cache"][0], self.paths["layer_code"]
        for name, path in self.paths.items():
            for prefix, at in (("", 0), (ONE_ROW, 3)):
                if figures := path[at : at + 3]:
                    cycles, lines, trips = (*figures, 0.0, 0.0)[:3]
                    kept = live[at] <= cached and name not in _ONCE_A_STEP
                    cold = cycles + (0.0 if kept else lines * line) + trips * trip
                    found[prefix + name] = Path(cold / self.clock_hz, cycles / self.clock_hz, trips > 0)
        return found

    @property
    def switch_bytes_per_s(self) -> float:
        """The rate of a node's switches in one direction; without switches, the rate at which its GPUs send."""
        if not self.node.switches:
            return self.node.gpus * self.link.egress_bytes_per_s
        return self.node.switches * self.node.switch_ports * self.link.port_bytes_per_s

    def flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s for operands of `dtype`: bf16, fp8, fp4, int8 or fp32."""
        rate: float | None = getattr(self.rates, dtype, None)
        if rate is None:
            raise MegakernelError(f"{self.name} does not compute in {dtype}: choose another --machine or --dtype")
        return rate

    def intensity(self, dtype: str = "bf16") -> float:
        """Return the FLOPs per byte read from HBM above which arithmetic, not memory bandwidth, limits the chip."""
        return self.flops_per_s(dtype) / self.chip.hbm_bytes_per_s

    def critical_rows(self, dtype: str = "bf16", weight_bytes: float | None = None) -> float:
        """Return the number of rows above which a matmul's arithmetic takes longer than reading its weights.
        `weight_bytes` is the size of a weight, by default that of an operand."""
        return self.intensity(dtype) * (OPERAND_BYTES[dtype] if weight_bytes is None else weight_bytes) / 2

    def levels(self, gpus: int) -> tuple[Level, ...]:
        """Return the levels of the network that connects `gpus` GPUs, from inside a node outwards; () for one GPU."""
        if gpus < 2:
            return ()
        inside = min(gpus, self.node.gpus)
        out = [Level("node", inside, 1, self.link.egress_bytes_per_s)]
        if gpus <= self.node.gpus:
            return tuple(out)
        if gpus % self.node.gpus:
            raise MegakernelError(f"{gpus} GPUs do not fill {self.name} nodes: use a multiple of {self.node.gpus}")
        if not self.node.nodes_per_unit:
            raise MegakernelError(
                f"the network between nodes of {self.name} is not described: use at most {self.node.gpus} GPUs"
            )
        nodes = gpus // self.node.gpus
        unit = self.node.nodes_per_unit
        out.append(Level("leaf", min(nodes, unit), self.node.gpus, self.node.egress_bytes_per_s))
        if nodes > unit:
            out.append(Level("spine", ceil(nodes / unit), self.node.gpus * unit, self.node.egress_bytes_per_s * unit))
        return tuple(out)

    def curve(self, collective: str, gpus: int) -> Curve | None:
        """The measured bandwidths of a collective over this number of GPUs, or None if they were not measured."""
        return next((c for c in self.curves if (c.collective, c.gpus) == (collective, gpus)), None)
