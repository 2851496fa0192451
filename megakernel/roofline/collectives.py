"""Computes the least time of collectives. `array_bytes` is the size of the whole array, all shards together.

The formulas are from Austin et al., *How to Scale Your Model*, "How to Think About GPUs" (2025). They are exact: they
keep the factor (N - 1) / N that the book drops. docs/roofline.md lists the differences. Link rates are in one
direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..machine import Hardware, Level


def all_to_all_s(array_bytes: float, members: int, egress_bytes_per_s: float) -> float:
    """B (N - 1) / (N^2 W)."""
    return array_bytes * (members - 1) / (members**2 * egress_bytes_per_s)


def exchange_seconds(array_bytes: float, levels: Sequence[Level], chosen: int, nodes: int = 0) -> dict[str, float]:
    """Return the seconds, at each network level, to send each row of an array to `chosen` experts. The rows and the
    experts are spread over all GPUs.

    At a level with M children and with k = `chosen`, this is an all-to-all of min(k, M) copies of each row, because one
    copy goes to each child with a chosen expert. If a router restricts a row's experts to `nodes` nodes, at most
    `nodes` copies leave a node.
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
    """The latency of `hops` hops plus the transfer time of a message: hops x t_hop + B / W seconds."""
    return hops * hop_s + transfer_s


def measured_s(array_bytes: float, hardware: Hardware, members: int, passes: int = 2) -> float | None:
    """Return the seconds of a collective within a node according to the machine's measured curve, or None if this
    number of GPUs was not measured.

    Bus bandwidth counts the bytes that each member sends. So an all-reduce counts as two `passes`, and a gather or a
    reduce-scatter as one.
    """
    curve = hardware.curve("all_reduce", members)
    if curve is None:
        return None
    return passes * array_bytes * (members - 1) / members / curve.at(array_bytes)
