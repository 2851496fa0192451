"""The share of a cluster that each replica gets. A replica, with all of its tensor-parallel ranks, is on one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import MegakernelError


@dataclass(frozen=True)
class Node:
    """The resources of a machine of a cluster."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Share:
    """The share of its node that one replica gets."""

    threads: int
    gpus: int


def place(nodes: Sequence[Node], replicas: int, tp: int, threads: int | None, *, on_gpus: bool) -> Share:
    """The share of the cluster that each replica gets. Without `threads`, it has the largest number
    of cores with which all replicas fit. On GPUs, it also has one GPU per rank. Raises
    MegakernelError if the replicas do not fit.
    """
    gpus = tp if on_gpus else 0
    most = max((node.gpus for node in nodes), default=0)
    if gpus > most:
        raise MegakernelError(
            f"--tp {tp} takes {gpus} GPUs of one node, and no node of the cluster has more than {most}: ranks store"
            " into each other's memory during a step, by NVLink or one machine's memory, so they cannot be on"
            " several nodes; take a smaller --tp and more --replicas"
        )
    largest = max((node.cpus for node in nodes), default=0)
    if threads is not None and threads > largest:
        raise MegakernelError(
            f"--threads {threads} exceeds the {largest} CPUs of the cluster's largest node, and all ranks of a replica"
            " must run on one node"
        )

    def fit(cpus: int) -> int:
        return sum(min(node.cpus // cpus, node.gpus // gpus if gpus else node.cpus) for node in nodes)

    taken = threads or _largest(lambda cpus: fit(cpus) >= replicas, largest)
    if taken and fit(taken) >= replicas:
        return Share(taken, gpus)
    each = [
        f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in ((taken or 1, "CPU"), (gpus, "GPU")) if count
    ]
    raise MegakernelError(
        f"{replicas} replicas of {' and '.join(each)} each do not fit the cluster, which has room for"
        f" {fit(taken or 1)}: take fewer --replicas, or fewer --threads"
    )


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, or 0."""
    return next((number for number in range(most, 0, -1) if fits(number)), 0)
