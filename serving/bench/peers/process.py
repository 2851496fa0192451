"""Runs a peer (another inference program) that is a Python library in a process of its own.

The peer's threads, memory and crashes then do not affect our process. The peer's process reads lines of JSON, first the
task and then one line per run, and answers each line with a line of JSON. The library is wrapped by a module with the
functions `settings` and `load` (see `torch_llama`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.serving.bench.peers.contest import Settings, Task, Timed, Trial


class Process:
    """A peer (a Python library for inference) in a process of its own. `module` is the Python module that wraps it."""

    def __init__(self, name: str, module: str, task: Task) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._module, self._task = module, task
        self._process: subprocess.Popen[str] | None = None
        self._errors = TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed by close()

    def settings(self, phase: Timed) -> tuple[Settings, list[Settings]]:
        made: tuple[Settings, list[Settings]] = import_module(self._module).settings(self._task, phase)
        return made

    def seconds(self, phase: Timed, settings: Settings) -> float:
        if self._process is None:
            command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({self._module!r})"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
            self._process = subprocess.Popen(command, text=True, **pipes)
            self.about = self._ask(asdict(self._task))
        value = self._ask({"phase": phase, "settings": settings}).get("seconds")
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            self._end()
            raise MegakernelError(f"{self.name} reported an invalid run time: {value!r} seconds")
        return float(value)

    def close(self) -> None:
        self._end()
        self._errors.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        try:
            answer: dict[str, Any] = dict(json.loads(line))
        except (ValueError, TypeError):
            self._end()
            self._errors.seek(0)
            said = [text for text in self._errors.read().splitlines() if text.strip()]
            raise MegakernelError(f"{self.name} failed: {said[-1] if said else 'its process ended'}") from None
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve(module: str) -> None:
    """Load the peer that `module` wraps, and answer each line of standard input. The peer's process runs this."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the answers

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    given = json.loads(sys.stdin.readline())
    seconds, about = import_module(module).load(Task(**given | {"work": Trial(**given["work"])}))
    answer(about)
    for line in sys.stdin:
        answer({"seconds": seconds(**json.loads(line))})
