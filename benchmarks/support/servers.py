"""Starts servers as child processes for comparisons."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 1800.0  # time until a server must answer; it is long, because large models load slowly
SHUTDOWN_S = 30.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Child:
    url: str
    pid: int


@contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[Child]:
    """Start `command`, with `{port}` filled in, and yield when its /health answers 200. The process ends with the
    block.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `with` blocks end
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    line = [part.replace("{port}", str(port)) for part in command]
    print("$", *line, file=sys.stderr)
    with log.open("wb") as out:
        process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait(process, url, log)
        yield Child(url, process.pid)
    finally:
        for sig in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, sig)
                try:
                    process.wait(SHUTDOWN_S)
                except subprocess.TimeoutExpired:
                    continue


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{url} did not start: {' | '.join(log.read_text(errors='replace').splitlines()[-5:])}")
        time.sleep(0.25)


def megakernel(*arguments: str) -> list[str]:
    """Our command line, with the Python that runs this script."""
    return [sys.executable, "-P", "-c", "import sys; from megakernel.cli import main; sys.exit(main())", *arguments]


def measured(*arguments: str) -> dict[str, Any]:
    """The JSON object of one of our commands."""
    command = megakernel(*arguments, "--json")
    print("$ megakernel", *arguments, file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"megakernel {' '.join(arguments)} failed")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def machine_facts() -> dict[str, Any]:
    """The facts about a machine that make a figure comparable."""
    report = measured("doctor")
    return {name: report[name] for name in ("system", "cpu", "cores", "simd", "gpus", "python", "ceilings")}
