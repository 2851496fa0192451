"""The environment variables that Ray reads once, when a process imports it."""

from __future__ import annotations

import os
from pathlib import Path

# Settings for clusters that `serve` starts. Calls between processes use gRPC and stay in one thread
# each. With Ray's defaults, a streamed token takes more than twice the CPU time.
_OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # A server is not background work.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def prepare(*, join: bool) -> None:
    """Set missing variables before Ray is imported. When joining a cluster, use a token if there is one."""
    for name, value in _OWN.items():
        os.environ.setdefault(name, value)
    given = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if join and (given or (Path.home() / ".ray" / "auth_token").is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
