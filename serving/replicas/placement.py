"""Computes the share of a cluster that each replica gets. All tensor-parallel ranks of a replica are on one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megakernel.errors import MegakernelError


@dataclass(frozen=True)
class Node:
    """The resources of one machine of the cluster."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Share:
    """The share of its node that one replica gets."""

    threads: int
    gpus: int


def place(nodes: Sequence[Node], replicas: int, tp: int, threads: int | None, *, on_gpus: bool) -> Share:
    """Return the share of the cluster that each replica gets.

    If `threads` is None, each replica gets the largest number of CPUs with which all replicas fit. On GPUs, it also
    gets one GPU per rank. Raises MegakernelError if the replicas do not fit.
    """
    gpus = tp if on_gpus else 0
    most = max((node.gpus for node in nodes), default=0)
    if gpus > most:
        raise MegakernelError(
            f"--tp {tp} takes {gpus} GPUs of one node, and no node of the cluster has more than {most}: all ranks of a"
            " replica must be on one node, because they store into each other's memory; take a smaller --tp and more"
            " --replicas"
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
    """Return the largest number up to `most` for which `fits` is true, or 0 if there is none."""
    return next((number for number in range(most, 0, -1) if fits(number)), 0)
