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

READY_S = 1800.0  # seconds that a server may take to start; large models load slowly
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
    """Start a server, and stop it when the `with` block ends.

    A free port replaces `{port}` in `command`. Yields the server's URL and process id once /health answers 200.
    """
    # On SIGTERM, raise SystemExit in this process, so that `with` blocks end and stop the servers that they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
            end = " | ".join(log.read_text(errors="replace").splitlines()[-5:])
            raise SystemExit(f"the server at {url} did not start. Its log {log} ends with: {end}")
        time.sleep(0.25)


def megakernel(*arguments: str) -> list[str]:
    """Return the command line of `megakernel` with `arguments`, for the Python that runs this script."""
    return [sys.executable, "-P", "-c", "import sys; from megakernel.cli import main; sys.exit(main())", *arguments]


def measured(*arguments: str) -> dict[str, Any]:
    """Run `megakernel` with `arguments` and --json, and return the JSON object that it prints."""
    command = megakernel(*arguments, "--json")
    print("$ megakernel", *arguments, file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"`megakernel {' '.join(arguments)}` failed; its messages are above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def machine_facts() -> dict[str, Any]:
    """Describe this machine: what a reader must know to compare figures with those of another machine."""
    report = measured("doctor")
    return {name: report[name] for name in ("system", "cpu", "cores", "simd", "gpus", "python", "ceilings")}
