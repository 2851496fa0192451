"""Questions about collectives and the networks that carry them."""

from __future__ import annotations

from ..errors import MegakernelError
from ..machine import Hardware, Level
from . import book
from .ask import Figures, question
from .collectives import exchange_seconds, latency_s, measured_s

_GATHER = "B (D - 1) S / (D max(Y, S) W), slowest level: degree D, S GPUs and link W per child, Y inner ways"


@question(
    "all-gather",
    *(10, 11, 15, 16, 17, 21, 37),
    what="least time until each GPU has a whole array, of which it had one part; a reduce-scatter takes as long",
    formula=_GATHER,
)
def all_gather(machine: Hardware, bytes: float, gpus: int, inner: int = 1) -> Figures:
    levels = _levels(machine, gpus)
    found = _levelled(levels, book.level_seconds(bytes, levels, inner))
    return found | {"measured_s": measured_s(bytes, machine, gpus, passes=1) if inner == 1 else None}


@question(
    "all-reduce",
    *(18, 19, 20, 38),
    what="least time until each GPU has the sum of all arrays, by two passes or by addition in switches (SHARP)",
    formula=f"twice {_GATHER}; if switches do the addition: B S / (max(Y, S) W)",
)
def all_reduce(machine: Hardware, bytes: float, gpus: int, inner: int = 1, in_network: bool = False) -> Figures:
    levels = _levels(machine, gpus)
    ring = [2 * seconds for seconds in book.level_seconds(bytes, levels, inner)]
    found = _levelled(levels, book.level_shares(bytes, levels, inner) if in_network else ring)
    if inner > 1:
        return found
    if not in_network:
        return found | {"measured_s": measured_s(bytes, machine, gpus)}
    seen = machine.name == book.IN_NETWORK_ON and gpus == machine.node.gpus
    part = 2 * (gpus - 1) / gpus  # bus bandwidth is defined by the bytes that a ring all-reduce sends
    return found | {
        "gain": max(ring) / max(book.level_shares(bytes, levels)),
        "measured_best_s": part * bytes / book.H100_IN_NETWORK_BUS_BYTES_PER_S if seen else None,
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
    one = bytes / gpus if copies else bytes
    seconds = exchange_seconds(one, levels, copies or 1, nodes or 0)
    return _levelled(levels, [seconds[level.name] for level in levels])


@question(
    "levels",
    *(8, 9, 13),
    what="the levels of the network that connects the GPUs: how many children each has, and its bandwidth",
    formula="sum of all children's links; full bisection if this sum per node is the same as one level below",
)
def levels(machine: Hardware, gpus: int) -> Figures:
    found: Figures = {"switches_of_a_node_bytes_per_s": machine.switch_bytes_per_s}
    for level in _levels(machine, gpus):
        found |= {
            f"{level.name}_degree": level.degree,
            f"{level.name}_bytes_per_s": book.level_bytes_per_s(level),
            f"{level.name}_gather_bytes_per_s": 1 / book.level_seconds(1.0, [level])[0],
        }
        if level.child_gpus > 1:
            nodes = level.degree * level.child_gpus / machine.node.gpus
            found[f"{level.name}_per_node_bytes_per_s"] = book.level_bytes_per_s(level) / nodes
    found["bisection_of_a_node_both_ways_bytes_per_s"] = machine.node.gpus * machine.link.egress_bytes_per_s
    return found


@question(
    "switches",
    *(14, 33),
    what="how many switches and cables a cluster of this many GPUs needs",
    formula="a fat tree with full bisection: half of a leaf's ports go up; a core layer if a spine has too few ports",
)
def switches(machine: Hardware, gpus: int) -> Figures:
    parts = book.parts(machine, gpus)
    dealt = book.LINKS_PER_SWITCH.get(machine.name)
    links = None if dealt is None else " + ".join(map(str, dealt))
    return vars(parts) | {"switches": parts.switches, "links_of_a_gpu_to_switches": links}


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
        "in_a_node_s": latency_s(hops, machine.costs.node_hop_s, bytes / machine.link.egress_bytes_per_s),
        "between_nodes_s": latency_s(hops, machine.costs.scale_out_hop_s, bytes / machine.node.egress_bytes_per_s),
    }


def _levels(machine: Hardware, gpus: int) -> tuple[Level, ...]:
    if gpus < 2:
        raise MegakernelError("one GPU sends nothing: use --gpus 2 or more")
    return machine.levels(gpus)


def _levelled(levels: tuple[Level, ...], seconds: list[float]) -> Figures:
    """Combine the times of several network levels: the time of the slowest level is the result."""
    longest = max(range(len(levels)), key=lambda i: seconds[i])
    each = {f"{level.name}_s": s for level, s in zip(levels, seconds, strict=True)}
    return {"least_s": seconds[longest], "bound": f"the {levels[longest].name} level", **each}
