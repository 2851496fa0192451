"""The least time of collectives. `array_bytes` is the whole array, all shards together.

Formulas are from Austin et al., *How to Scale Your Model*, "How to Think About GPUs" (2025), written exactly, with the
(N - 1) / N that the text drops; docs/roofline.md lists the differences. Link rates are in one direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..machine import Hardware, Level


def all_to_all_s(array_bytes: float, members: int, egress_bytes_per_s: float) -> float:
    """B (N - 1) / (N^2 W)."""
    return array_bytes * (members - 1) / (members**2 * egress_bytes_per_s)


def axis_seconds(array_bytes: float, levels: Sequence[Level], inner: int, members: int) -> dict[str, float]:
    """The seconds at each level of a gather over `members` GPUs that are `inner` GPUs apart; inner axes already shard
    the array in `inner` ways.

    Every byte that the GPUs of a node lack enters over the node's link:
    B S / (max(Y, S) W) (1 - max(Y, S) / (X Y)), with B bytes in the array, S GPUs behind a link of
    W bytes/s, Y = inner, X = members. Inside a node, a GPU gets from its peers what they have or
    received: B (d - 1) / (d Y W), with d members per node.
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


def exchange_seconds(array_bytes: float, levels: Sequence[Level], chosen: int, nodes: int = 0) -> dict[str, float]:
    """The seconds at each level of sending each row of an array, spread over all GPUs, to `chosen` experts among them.

    Over a level with M children, this is an all-to-all of min(k, M) copies of each row, k = `chosen`: one to each child
    with a chosen expert. If a router restricts a row's experts to `nodes` nodes, at most `nodes` copies leave a node.
    """
    out: dict[str, float] = {}
    children = 1
    for level in reversed(levels):
        children *= level.degree
        most = nodes if nodes and level.child_gpus > 1 else chosen
        copies = min(chosen, most, children)
        out[level.name] = all_to_all_s(array_bytes * copies, children, level.child_bytes_per_s)
    return out


def latency_s(hops: int, hop_s: float, transfer_s: float) -> float:
    """hops x t_hop + B / W: the latency of a small message plus the transfer time of a large one."""
    return hops * hop_s + transfer_s


def measured_s(array_bytes: float, hardware: Hardware, members: int, passes: int = 2) -> float | None:
    """The seconds of a collective within a node by the machine's measured curve; None if it was not measured.

    Bus bandwidth counts what each member sends, so an all-reduce is two `passes`, and a gather or a reduce-scatter is
    one.
    """
    curve = hardware.curve("all_reduce", members)
    if curve is None:
        return None
    return passes * array_bytes * (members - 1) / members / curve.at(array_bytes)
