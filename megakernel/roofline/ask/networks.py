"""Questions about collectives and networks. Link rates are in one direction.

The formulas keep the factor (N - 1) / N, which the book "How to Scale Your Model" drops. docs/roofline.md lists all
differences from the book.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from ...errors import MegakernelError
from ...machine import Hardware, Level
from ..program_step import measured_s
from .question import Figures, known, question

_GATHER = "B (D - 1) S / (D max(Y, S) W), slowest level: degree D, S GPUs and link W per child, Y inner ways"
# An all-reduce of eight H100s with additions in the switches, as measured by the book "How to Scale Your Model".
_IN_NETWORK_ON, _IN_NETWORK_BUS_BYTES_PER_S = "h100", 480e9
# The number of leaf switches in one unit of NVIDIA's SuperPOD reference designs. The number for GB200 is the one that
# full bisection bandwidth requires.
LEAF_SWITCHES_PER_UNIT = {"h100": 8, "b200": 8, "gb200-nvl72": 18}
SWITCH_PORTS = 64
# The number of a GPU's links to each switch of its node.
LINKS_PER_SWITCH = {"a100": (2,) * 6, "h100": (5, 4, 4, 5), "h800": (3,) * 4, "b200": (9, 9), "gb200-nvl72": (1,) * 18}


def level_seconds(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """Return the seconds that each level of a network needs for an all-gather or a reduce-scatter. The first level is
    inside a node. The slowest level determines the time.

    A level connects D children (GPUs or groups of GPUs). A child has S GPUs and a link of W bytes/s. The level needs B
    (D - 1) S / (D max(Y, S) W) seconds, where B is `array_bytes`, the size of the whole array. If the array is also
    divided along another axis, Y = `inner` is the number of GPUs along that axis.
    """
    shares = level_shares(array_bytes, levels, inner)
    return [share * (level.degree - 1) / level.degree for share, level in zip(shares, levels, strict=True)]


def level_shares(array_bytes: float, levels: Sequence[Level], inner: int = 1) -> list[float]:
    """Return the seconds that each level of a network needs for an all-reduce if the switches add. A child's share of
    the array then crosses its link once in each direction. The arguments are those of `level_seconds`."""
    return [array_bytes * x.child_gpus / (max(inner, x.child_gpus) * x.child_bytes_per_s) for x in levels]


@question(
    "all-gather",
    *(10, 11, 15, 16, 17, 21, 37),
    what="least time until each GPU has a whole array, of which it had one part; a reduce-scatter takes as long",
    formula=_GATHER,
)
def all_gather(machine: Hardware, bytes: float, gpus: int, inner: int = 1) -> Figures:
    levels = _levels(machine, gpus)
    found = _levelled(levels, level_seconds(bytes, levels, inner))
    return found | {"measured_s": measured_s(bytes, machine, gpus, passes=1) if inner == 1 else None}


@question(
    "all-reduce",
    *(18, 19, 20, 38),
    what="least time until each GPU has the sum of all arrays, by reduce-scatter and all-gather or in the switches",
    formula=f"twice {_GATHER}; if switches do the addition: B S / (max(Y, S) W)",
)
def all_reduce(machine: Hardware, bytes: float, gpus: int, inner: int = 1, in_network: bool = False) -> Figures:
    levels = _levels(machine, gpus)
    ring, added = [2 * s for s in level_seconds(bytes, levels, inner)], level_shares(bytes, levels, inner)
    found = _levelled(levels, added if in_network else ring)
    if inner > 1:
        return found
    if not in_network:
        return found | {"measured_s": measured_s(bytes, machine, gpus)}
    seen = machine.name == _IN_NETWORK_ON and gpus == machine.node.gpus
    part = 2 * (gpus - 1) / gpus  # bus bandwidth counts the bytes that a ring all-reduce would send
    return found | {
        "gain": max(ring) / max(added),
        "measured_best_s": part * bytes / _IN_NETWORK_BUS_BYTES_PER_S if seen else None,
    }


@question(
    "all-to-all",
    *(12, 34, 36),
    what="least time until each GPU has sent every other GPU its part of an array",
    formula="B (M - 1) / (M^2 W) over a level's M children; with --copies k, that times min(k, M) / N for N GPUs",
)
def all_to_all(
    machine: Hardware, bytes: float, gpus: int, copies: int | None = None, nodes: int | None = None
) -> Figures:
    levels = _levels(machine, gpus)
    array = bytes / gpus if copies else bytes
    seconds, children = [], 1
    for level in reversed(levels):
        children *= level.degree
        # A row is sent once to each child with a receiver. A router may restrict the receivers to a few nodes.
        sent = min(copies or 1, nodes if nodes and level.child_gpus > 1 else children, children)
        seconds.append(array * sent * (children - 1) / (children**2 * level.child_bytes_per_s))
    return _levelled(levels, seconds[::-1])


@question(
    "levels",
    *(8, 9, 13),
    what="the levels of the network that connects the GPUs: how many children each has, and its bandwidth",
    formula="sum of all children's links; full bisection if this sum per node is the same as one level below",
)
def levels(machine: Hardware, gpus: int) -> Figures:
    found: Figures = {"switches_of_a_node_bytes_per_s": machine.switch_bytes_per_s}
    for level in _levels(machine, gpus):
        rate = level.degree * level.child_bytes_per_s
        found |= {
            f"{level.name}_degree": level.degree,
            f"{level.name}_bytes_per_s": rate,
            f"{level.name}_gather_bytes_per_s": 1 / level_seconds(1.0, [level])[0],
        }
        if level.child_gpus > 1:
            found[f"{level.name}_per_node_bytes_per_s"] = rate * machine.node.gpus / (level.degree * level.child_gpus)
    found["bisection_of_a_node_both_ways_bytes_per_s"] = machine.node.gpus * machine.link.egress_bytes_per_s
    return found


@question(
    "switches",
    *(14, 33),
    what="how many switches and cables a cluster of this many GPUs needs",
    formula="a fat tree with full bisection: half of a leaf's ports go up; a core layer if a spine has too few ports",
)
def switches(machine: Hardware, gpus: int) -> Figures:
    """Count the switches of a network of whole SuperPOD units. Half of a leaf switch's ports lead up to spine switches.
    If there are more leaf switches than ports of a spine switch, a third level of core switches connects the spine
    switches."""
    fabric = machine.fabric
    if fabric is None:
        raise MegakernelError(f"the network between nodes of {machine.name} is not described")
    nodes = ceil(gpus / machine.node.gpus)
    units = ceil(nodes / fabric.nodes_per_unit)
    leaves = units * known(LEAF_SWITCHES_PER_UNIT, machine, "the number of leaf switches")
    spines = cores = 0
    if units > 1:
        spines = leaves // 2  # half of a leaf's ports lead up, and all of a spine's ports lead down
        cores = spines if leaves > SWITCH_PORTS else 0
        spines += cores
    found = {
        "nodes": nodes,
        "units": units,
        "node_switches": nodes * machine.node.switches,
        "leaf_switches": leaves,
        "spine_switches": spines,
        "core_switches": cores,
    }
    dealt = LINKS_PER_SWITCH.get(machine.name)
    return found | {
        "links_per_leaf_and_spine": SWITCH_PORTS / 2 / spines if spines else 0.0,
        "switches": nodes * machine.node.switches + leaves + spines + cores,
        "links_of_a_gpu_to_switches": None if dealt is None else " + ".join(map(str, dealt)),
    }


@question(
    "latency",
    10,
    what="latency of a small message: the time of its hops plus that of its bytes",
    formula="hops x t + B / W; N - 1 hops around a ring, log2 N along a tree",
)
def latency(machine: Hardware, bytes: float, hops: int = 1) -> Figures:
    if machine.costs is None:
        raise MegakernelError(f"the time of a hop on {machine.name} is not described: choose another --machine")
    return {
        "in_a_node_s": hops * machine.costs.node_hop_s + bytes / machine.link.egress_bytes_per_s,
        "between_nodes_s": hops * machine.costs.scale_out_hop_s + bytes / machine.node.egress_bytes_per_s,
    }


def _levels(machine: Hardware, gpus: int) -> tuple[Level, ...]:
    if gpus < 2:
        raise MegakernelError("one GPU sends nothing: use --gpus 2 or more")
    return machine.levels(gpus)


def _levelled(levels: Sequence[Level], seconds: Sequence[float]) -> Figures:
    """Combine the seconds that each level of a network needs. The time of the slowest level is the result."""
    longest = max(range(len(levels)), key=lambda i: seconds[i])
    each = {f"{level.name}_s": s for level, s in zip(levels, seconds, strict=True)}
    return {"least_s": seconds[longest], "bound": f"the {levels[longest].name} level", **each}
