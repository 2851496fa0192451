"""A fake peer for tests. A peer is another engine with which `bench throughput --vs` compares megakernel. The fake peer
is of the kind that runs as Python code in a process of its own. It loads no model. Its settings determine the times
that it reports, and whether it crashes."""

import os
from collections.abc import Callable
from typing import Any

from megakernel.serving.bench.peers.contest import Settings, Task, Timed


def settings(task: Task, phase: Timed) -> tuple[Settings, list[Settings]]:
    return {"threads": task.threads, "speed": 1}, [{"speed": 4}, {"speed": 2}, {"broken": True}]


def load(task: Task) -> tuple[Callable[[Timed, Settings], float], dict[str, Any]]:
    def seconds(phase: Timed, settings: Settings) -> float:
        print("noise on standard output")
        if settings.get("broken"):
            os.write(2, b"first line\nthe last word\n")
            os._exit(3)
        return float(settings.get("answer", 8.0 / settings.get("speed", 1)))

    return seconds, {"program": "fake", "process": os.getpid()}
