"""Prepares a deployment before Ray is imported: sets Ray's environment variables, and divides CPUs among replicas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.errors import MegakernelError

# Settings for clusters that `serve` starts. Ray reads them from the environment when it is imported. Processes then
# call each other by gRPC, and each process handles its calls in one thread. With Ray's defaults, a streamed token takes
# more than twice the CPU time.
_OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # run at normal priority, because a server is not background work
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def prepare(*, join: bool) -> None:
    """Set the environment variables in `_OWN`, except those that the user has set. Call this before Ray is imported.
    If `join` is set and the user has a Ray token, token authentication is turned on."""
    for name, value in _OWN.items():
        os.environ.setdefault(name, value)
    given = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if join and (given or (Path.home() / ".ray" / "auth_token").is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@dataclass(frozen=True)
class Resources:
    """The CPUs and GPUs of one machine of the cluster, or those that one replica gets on its machine."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Plan:
    """What to deploy. Requests with the same prefix go to the same replica, unless that replica has over `slack` more
    requests than the least busy one. If `slack` is None, Ray distributes requests without regard to prefixes."""

    replicas: int
    share: Resources  # of each replica
    settings: dict[str, Any]  # the values of the flags of `serve` by name
    at_once: int
    slack: int | None
    max_body: int
    stall_seconds: float
    drain_seconds: float


def place(nodes: Sequence[Resources], replicas: int, tp: int, threads: int | None, *, on_gpus: bool) -> Resources:
    """Return the CPUs and GPUs that each replica gets. If `threads` is None, each replica gets the largest
    number of CPUs with which all replicas fit. On GPUs, it also gets one GPU per rank. Raises MegakernelError if the
    replicas do not fit."""
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
            " must run on one node: lower --threads"
        )

    def fit(cpus: int) -> int:
        return sum(min(node.cpus // cpus, node.gpus // gpus if gpus else node.cpus) for node in nodes)

    taken = threads or next((cpus for cpus in range(largest, 0, -1) if fit(cpus) >= replicas), 0)
    if taken and fit(taken) >= replicas:
        return Resources(taken, gpus)
    each = [
        f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in ((taken or 1, "CPU"), (gpus, "GPU")) if count
    ]
    raise MegakernelError(
        f"{replicas} replicas of {' and '.join(each)} each do not fit the cluster, which has room for"
        f" {fit(taken or 1)}: take fewer --replicas, or fewer --threads"
    )
