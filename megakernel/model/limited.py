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

# Elapsed seconds that an answer may take per allowed second of processor time: on a busy machine, processes wait.
_PATIENCE = 15


class Ended(Exception):
    """Raised if the work took too much time or memory. The text says why."""


class HelperLost(MegakernelError):
    """Raised if a process cannot start, or if it was killed or stopped from outside. The request may succeed later."""


class _Killed(Exception):
    pass


class LimitedProcess:
    """Runs `script` in a process with limits: `seconds` of processor time per answer, and `memory_bytes` bytes of
    memory. `more` is passed to the script as further arguments.

    The process starts at the first request, and its first input line is `begin`. Each answer is one line of JSON,
    {kind: text}. After an answer of the kind "broken", the next request starts a new process. If the process is killed,
    a new one gets the request once more.
    """

    def __init__(self, script: Path, begin: object, seconds: float, memory_bytes: int, *more: int) -> None:
        self._command = [sys.executable, "-P", str(script), *map(str, (seconds, memory_bytes, *more))]
        self._begin, self._seconds, self._memory_bytes = begin, seconds, memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, values: object) -> tuple[str, str]:
        """Send `values` to the process as JSON, and return the kind and the text of its answer. If the process is
        killed, a second one is asked. Raises HelperLost if that is killed too, and Ended if a limit is exceeded."""
        with self._lock:
            try:
                return self._asked(values)
            except _Killed:
                try:
                    return self._asked(values)
                except _Killed as e:
                    raise HelperLost(f"two helper processes ended before they answered: {e}: try again later") from e

    def _asked(self, values: object) -> tuple[str, str]:
        if self._process is None:
            kind, text = self._exchange(self._start(), self._begin)
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
            raise HelperLost(f"cannot start a helper process: {e.strerror}") from e
        weakref.finalize(self, _end, process)
        return process

    def _exchange(self, process: subprocess.Popen[str], values: object) -> tuple[str, str]:
        """Send `values` and return the answer. A process that ended or was interrupted is not used again."""
        assert process.stdin is not None and process.stdout is not None
        self._process = None
        late = threading.Timer(self._seconds * _PATIENCE, process.kill)
        late.daemon = True
        late.start()
        try:
            process.stdin.write(json.dumps(values) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            _end(process)
            raise
        finally:
            late.cancel()
        if not line.endswith("\n"):  # a process that is killed may have written a part of its answer
            _end(process)
            if process.returncode == -signal.SIGPROF:
                raise Ended(f"the grammar or template takes more than {self._seconds} s of processor time: simplify it")
            if process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
                raise _Killed(f"a helper process was killed, or did not answer for {self._seconds * _PATIENCE:g} s")
            raise Ended(f"the grammar or template needs more than {self._memory_bytes >> 20} MiB: simplify it")
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
