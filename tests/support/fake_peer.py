"""A peer in a process of its own, without a model: times are what the settings say."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megakernel.serving.bench.peers.contest import Phase, Settings, Task


def settings(task: Task, phase: Phase) -> tuple[Settings, list[Settings]]:
    return {"threads": task.threads, "speed": 1}, [{"speed": 4}, {"speed": 2}, {"broken": True}]


def load(task: Task) -> tuple[Callable[[Phase, Settings], float], dict[str, Any]]:
    def seconds(phase: Phase, settings: Settings) -> float:
        print("noise on standard output")
        if settings.get("broken"):
            os.write(2, b"first line\nthe last word\n")
            os._exit(3)
        return float(settings.get("answer", 8.0 / settings.get("speed", 1)))

    return seconds, {"program": "fake", "process": os.getpid()}
