"""Declares what is known of hardware: chips, links, nodes, networks, and the cost of synchronisation.

Names of figures include their unit. Rates are per second, link rates are in one direction, and FLOP rates are dense,
with a multiply-add counted as two. The tables, with a source for each figure, are `known/*.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import ceil, exp, log

from ..errors import MegakernelError


@dataclass(frozen=True)
class Chip:
    """One processor, described in terms of a GPU. The machine file of the TPU says what the terms mean for a TPU."""

    generation: str
    sms: int
    subpartitions_per_sm: int  # each subpartition has a tensor core and a warp scheduler
    fp32_lanes_per_subpartition: int
    hbm_bytes: float
    hbm_bytes_per_s: float
    boost_clock_hz: float | None = None
    l2_bytes: float = 0.0
    l2_bytes_per_clock: float = 0.0  # bytes that each SM gets from L2 when all SMs load; measured
    load_bytes_per_clock: float = 0.0  # the maximum number of bytes that one SM loads
    usd_per_hour: float | None = None  # a list price

    @property
    def subpartitions(self) -> int:
        return self.sms * self.subpartitions_per_sm

    @property
    def fp32_lanes(self) -> int:
        return self.subpartitions * self.fp32_lanes_per_subpartition

    def clock_for(self, fma_flops_per_s: float) -> float:
        """The clock in Hz at which the multiply-adds of all lanes make this many FLOP/s."""
        return fma_flops_per_s / (2 * self.fp32_lanes)


# The bytes of one operand of a multiply-add, by the name of its type in `Rates`.
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "fp32": 4.0}


@dataclass(frozen=True)
class Rates:
    """FLOP/s by operand type: of the matrix unit for bf16, fp8 (or int8) and fp4. None if the chip lacks the type."""

    bf16: float
    fp32: float  # multiply-adds of the vector lanes
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None  # operations per second of a CPU on 8-bit integers, if they were measured


@dataclass(frozen=True)
class Link:
    """The links of one chip to the other chips of its node."""

    ports: int
    port_bytes_per_s: float

    @property
    def egress_bytes_per_s(self) -> float:
        return self.ports * self.port_bytes_per_s


@dataclass(frozen=True)
class Node:
    """GPUs that reach each other at the full rate of their links: an NVLink domain."""

    gpus: int
    nic_bytes_per_s_per_gpu: float  # the rate at which each GPU sends out of the node
    switches: int = 0
    switch_ports: int = 0

    @property
    def egress_bytes_per_s(self) -> float:
        return self.gpus * self.nic_bytes_per_s_per_gpu


@dataclass(frozen=True)
class Fabric:
    """A fat tree between nodes. The nodes of a unit share leaf switches, which have as many cables up as down."""

    nodes_per_unit: int


@dataclass(frozen=True)
class Costs:
    """Latencies in seconds, for operations that move no data."""

    stream_launch_s: float  # the time to launch an empty kernel in a stream
    signal_s: float  # the time from a signal until a waiting SM starts, under memory load
    dispatch_s: float  # the time to fetch, decode and set up one instruction
    node_hop_s: float  # the time of a message between GPUs of a node, including waits of GPUs that are not in step
    scale_out_hop_s: float  # the time of a message between nodes


@dataclass(frozen=True)
class Issue:
    """The least number of cycles that the warps of each role need to issue their work, as read from the machine code.

    The roles of warps are loaders, which fill pages of shared memory, and consumers, which compute
    on these pages. Consumers use matrix units or, for a few rows, dot products (dots). If several
    warps of a role share a scheduler, their cycles add up.
    """

    pass_page: float  # cycles of a loader to skip a page that the other loader fills
    weight_page: float  # cycles of a loader to fill a weight page of dots
    input_page: float  # cycles of a loader to fill an input page of dots
    tile_page: float  # cycles of a loader to fill a page of a matmul on matrix units
    dot_pair: float  # cycles of the consumers to multiply a pair of weight pages by one row, with dots
    dot_pairs: float  # cycles of the consumers to multiply a pair of weight pages by two rows, with dots
    dot_row: float  # additional cycles for each row after the second, with dots
    dot_unit: float  # cycles of the consumers to finish a unit of output columns, with dots
    k_step: float  # cycles of the consumers for 64 elements of K of a tile, with matrix units

    # Cycles of all roles from the end of an instruction's arithmetic to the start of an instruction that waits for it.
    handoff: float
    sample_step: float  # cycles to process one group of logits of a row while the next group is loaded
    sample_entries: float  # logits in such a group (a count, not cycles)

    def at(self, clock_hz: float) -> Issue:
        """Return the same times in seconds instead of cycles, for a clock of `clock_hz`."""
        cycles = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sample_entries"}
        return replace(self, **{name: value / clock_hz for name, value in cycles.items()})


@dataclass(frozen=True)
class Core:
    """The rates of one CPU core that works alone and executes the interpreter's own instructions in bfloat16.

    Arithmetic rates are given for several numbers of rows of a matmul tile, and of (row, head) pairs of an attention
    item. Between two of these numbers, rates are interpolated linearly in log(rows).
    """

    memory_bytes_per_s: float
    matmul_rows: tuple[float, ...]
    matmul_flops_per_s: tuple[float, ...]
    attention_rows: tuple[float, ...]
    attention_flops_per_s: tuple[float, ...]
    vector_flops_per_s: float


@dataclass(frozen=True)
class Tiles:
    """Tile shapes that suit the interpreter on this machine."""

    rows: int  # token rows of a matmul tile and of a row block
    cols: int  # output columns of a matmul tile
    col_unit: int  # column tiles start and end on multiples of this number of columns
    page: int  # KV tokens per page of the KV cache
    target: str  # the target that programs are compiled for
    pages: int = 0  # pages of shared memory in the ring that a worker streams operands through; 0 for a CPU core


@dataclass(frozen=True)
class Curve:
    """The measured bus bandwidth of a collective over `gpus` GPUs of one node, by message size.

    Bus bandwidth is defined as in NCCL's tests: the bytes that each GPU must send, divided by the seconds.
    """

    collective: str
    gpus: int
    message_bytes: tuple[float, ...]
    bus_bytes_per_s: tuple[float, ...]

    def at(self, message_bytes: float) -> float:
        """The bytes/s at a message size, interpolated in logarithms; below the curve, the time is constant."""
        points = list(zip(self.message_bytes, self.bus_bytes_per_s, strict=True))
        if message_bytes <= points[0][0]:
            return points[0][1] * message_bytes / points[0][0]
        for (low, slow), (high, fast) in pairwise(points):
            if message_bytes <= high:
                part = log(message_bytes / low) / log(high / low)
                return exp(log(slow) + part * log(fast / slow))
        return points[-1][1]


@dataclass(frozen=True)
class Level:
    """A level of a network that joins `degree` children, each with `child_gpus` GPUs and its own link."""

    name: str
    degree: int
    child_gpus: int
    child_bytes_per_s: float


@dataclass(frozen=True)
class Hardware:
    """One kind of machine: its chip, and the node and network that join such chips."""

    name: str
    chip: Chip
    rates: Rates
    link: Link
    node: Node
    fabric: Fabric | None = None
    costs: Costs | None = None  # None: the machine serves only for comparison
    tiles: Tiles | None = None
    issue: Issue | None = None
    core: Core | None = None  # the measured rates of a CPU core, if there are any
    curves: tuple[Curve, ...] = ()

    @property
    def clock_hz(self) -> float:
        """The boost clock in Hz or, if it is unknown, the clock that the fp32 rate implies."""
        return self.chip.boost_clock_hz or self.chip.clock_for(self.rates.fp32)

    @property
    def l2_bytes_per_s(self) -> float:
        """Bytes/s from the L2 cache to all SMs."""
        return self.chip.l2_bytes_per_clock * self.chip.sms * self.clock_hz

    @property
    def switch_bytes_per_s(self) -> float:
        """The rate of a node's switches in one direction; without switches, the rate of all GPUs together."""
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
        """The FLOPs per byte read from HBM above which arithmetic, not memory, limits the chip."""
        return self.flops_per_s(dtype) / self.chip.hbm_bytes_per_s

    def critical_rows(self, dtype: str = "bf16", weight_bytes: float | None = None) -> float:
        """The rows above which a matmul's arithmetic takes longer than reading its weights: intensity * bytes / 2."""
        return self.intensity(dtype) * (OPERAND_BYTES[dtype] if weight_bytes is None else weight_bytes) / 2

    def levels(self, gpus: int) -> tuple[Level, ...]:
        """The levels of the network that joins `gpus` GPUs, innermost first; empty for one GPU."""
        if gpus < 2:
            return ()
        inside = min(gpus, self.node.gpus)
        out = [Level("node", inside, 1, self.link.egress_bytes_per_s)]
        if gpus <= self.node.gpus:
            return tuple(out)
        if gpus % self.node.gpus:
            raise MegakernelError(f"{gpus} GPUs do not fill whole {self.name} nodes of {self.node.gpus} GPUs")
        if self.fabric is None:
            raise MegakernelError(
                f"the network between nodes of {self.name} is not described: use at most {self.node.gpus} GPUs"
            )
        nodes = gpus // self.node.gpus
        unit = self.fabric.nodes_per_unit
        out.append(Level("leaf", min(nodes, unit), self.node.gpus, self.node.egress_bytes_per_s))
        if nodes > unit:
            out.append(Level("spine", ceil(nodes / unit), self.node.gpus * unit, self.node.egress_bytes_per_s * unit))
        return tuple(out)

    def curve(self, collective: str, gpus: int) -> Curve | None:
        """Return the measured curve of a collective over this number of GPUs, or None if there is none."""
        return next((c for c in self.curves if (c.collective, c.gpus) == (collective, gpus)), None)
