"""Least time of collectives. `array_bytes` is the whole array, all shards together.

Formulas from Austin et al., *How to Scale Your Model*, "How to Think About GPUs" (2025), written exactly, with the
(N - 1) / N that the text drops; docs/roofline.md says where the two differ. Link rates are one direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..machine import Hardware, Level


def all_gather_s(array_bytes: float, members: int, egress_bytes_per_s: float) -> float:
    """B (N - 1) / (N W): each member gets what the others have. A reduce-scatter takes as long."""
    return array_bytes * (members - 1) / (members * egress_bytes_per_s)


def all_reduce_s(array_bytes: float, members: int, egress_bytes_per_s: float, *, in_network: bool = False) -> float:
    """A reduce-scatter and an all-gather; B / W where the switch adds, since each member sends and gets B once."""
    if in_network:
        return array_bytes / egress_bytes_per_s
    return 2 * all_gather_s(array_bytes, members, egress_bytes_per_s)


def all_to_all_s(array_bytes: float, members: int, egress_bytes_per_s: float, nonzero: float | None = None) -> float:
    """B (N - 1) / (N^2 W); times `nonzero` / N where only so many of a member's N shards hold anything."""
    share = 1.0 if nonzero is None else min(nonzero / members, 1.0)
    return array_bytes * (members - 1) / (members**2 * egress_bytes_per_s) * share


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


def axis_seconds(array_bytes: float, levels: Sequence[Level], inner: int, members: int) -> dict[str, float]:
    """Seconds at each level of a gather over `members` GPUs, `inner` apart, whose inner axes shard the array already.

    Out of a node every byte that its GPUs lack comes over its link: B S / (max(Y, S) W) (1 - max(Y, S) / (X Y)), with
    S GPUs behind the link, Y = inner, X = members. Inside, a GPU gets from its peers what they have or brought in:
    B (d - 1) / (d Y W), d members in a node. The same as `level_seconds` at levels that the
    axis fills.
    """
    out: dict[str, float] = {}
    for level in levels:
        if level.child_gpus == 1:
            inside = min(max(level.degree // inner, 1), members)
            out[level.name] = array_bytes * (inside - 1) / (inside * inner * level.child_bytes_per_s)
        else:
            behind = max(inner, level.child_gpus)
            lacking = max(0.0, 1 - behind / (members * inner))
            out[level.name] = array_bytes * level.child_gpus / (behind * level.child_bytes_per_s) * lacking
    return out


def exchange_seconds(array_bytes: float, levels: Sequence[Level], chosen: int) -> dict[str, float]:
    """Seconds at each level of sending each row of an array, spread over all GPUs, to `chosen` experts of them.

    An all-to-all over a level's M children of min(k, M) copies of each row: once to each child that has an expert.
    """
    out: dict[str, float] = {}
    children = 1
    for level in reversed(levels):
        children *= level.degree
        out[level.name] = all_to_all_s(array_bytes * min(chosen, children), children, level.child_bytes_per_s)
    return out


def switch_bytes(array_bytes: float, members: int, operation: str) -> tuple[float, float]:
    """(in, out) bytes of one node's switch, all ports together, for the operation within the node.

    A gather takes each shard in once and hands the whole to each member; a reduction in the switch takes the whole of
    each member in and hands the sum to each.
    """
    taken = array_bytes if operation == "all_gather" else array_bytes * members
    return taken, array_bytes * members


def latency_s(hops: int, hop_s: float, transfer_s: float) -> float:
    """hops x t_hop + B / W: what a small message waits for, added to what a large one takes."""
    return hops * hop_s + transfer_s


def ring_hops(members: int) -> int:
    """Hops of a reduce-scatter or all-gather around a ring."""
    return members - 1


def tree_hops(members: int) -> int:
    """Hops of a reduction along a binary tree: the whole part above log2 N."""
    return (members - 1).bit_length()


def measured_s(array_bytes: float, hardware: Hardware, members: int, passes: int = 2) -> float | None:
    """Seconds of a collective within a node by the machine's measured curve; None where nobody measured.

    Bus bandwidth counts what each member sends, so an all-reduce is two `passes`, a gather or a reduce-scatter one.
    """
    curve = hardware.curve("all_reduce", members)
    if curve is None:
        return None
    return passes * array_bytes * (members - 1) / members / curve.at(array_bytes)
