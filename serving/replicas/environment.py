"""Sets environment variables that Ray reads only once, when a process imports it."""

from __future__ import annotations

import os
from pathlib import Path

# Settings for clusters that `serve` starts. With them, processes call each other by gRPC, and each process handles its
# calls in one thread. With Ray's defaults, a streamed token takes more than twice the CPU time.
_OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # run at normal priority, because a server is not background work
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def prepare(*, join: bool) -> None:
    """Set the variables in `_OWN`, except those that the user has set. Call this before Ray is imported.

    If `join` is set and the user has a Ray token, token authentication is turned on.
    """
    for name, value in _OWN.items():
        os.environ.setdefault(name, value)
    given = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if join and (given or (Path.home() / ".ray" / "auth_token").is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
