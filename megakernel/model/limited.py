"""Runs an untrusted script in a process with limits on time and memory. The process answers requests line by line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from ..errors import MegakernelError


class Ended(Exception):
    """Raised if the process ended without an answer. The text says why."""


class LimitedProcess:
    """Runs `script` in a process with limits: `seconds` of processor time per answer, and `memory_bytes` bytes of
    memory. `more` is passed to the script as further arguments.

    The process starts at the first request, and its first input line is `begin`. Each answer is one line of JSON,
    {kind: text}. After an answer of the kind "broken", the next request starts a new process.
    """

    def __init__(self, script: Path, begin: object, seconds: float, memory_bytes: int, *more: int) -> None:
        self._command = [sys.executable, "-P", str(script), *map(str, (seconds, memory_bytes, *more))]
        self._begin, self._seconds, self._memory_bytes = begin, seconds, memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, values: object) -> tuple[str, str]:
        """Send `values` to the process as JSON, and return the kind and the text of its answer. Raises Ended."""
        with self._lock:
            if self._process is None:
                process = self._start()
                kind, text = self._exchange(process, self._begin)
                if kind != "text":
                    return kind, text
            assert self._process is not None
            return self._exchange(self._process, values)

    def _start(self) -> subprocess.Popen[str]:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                process_group=0,  # so that Ctrl-C does not reach this process
            )
        except OSError as e:
            raise MegakernelError(f"cannot start a process with limits: {e.strerror}") from e
        weakref.finalize(self, _end, process)
        return process

    def _exchange(self, process: subprocess.Popen[str], values: object) -> tuple[str, str]:
        """Send `values` and return the answer. A process that ended or was interrupted is not used again."""
        assert process.stdin is not None and process.stdout is not None
        self._process = None
        try:
            process.stdin.write(json.dumps(values) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            _end(process)
            raise
        if not line:
            _end(process)
            if process.returncode == -signal.SIGPROF:
                raise Ended(f"its process takes more than {self._seconds} s of processor time")
            raise Ended(f"its process needs more than {self._memory_bytes >> 20} MiB of memory or was killed")
        [(kind, text)] = json.loads(line).items()
        if kind == "broken":
            _end(process)
        else:
            self._process = process
        return kind, str(text)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # closing a pipe writes its buffered data, which fails if the process has ended
            pipe.close()
    process.wait()
