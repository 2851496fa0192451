"""Chat templates: untrusted Jinja programs from model files, run in Jinja's sandbox in a process with limits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2

from ..errors import MegakernelError
from .limits import MOST_PROMPT_CHARACTERS, MOST_TEMPLATE_BYTES, MOST_TEMPLATE_CHARACTERS, MOST_TEMPLATE_SECONDS
from .template_worker import environment

# Names of a template that have a value from elsewhere.
OWN_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
_WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """A template. Its process starts when it is first rendered, and ends with this object.

    The sandbox keeps a template from files and from Python's inner objects, not from loops and from numbers without
    end, and Jinja computes constants as early as it compiles. So only the syntax is checked here.
    """

    def __init__(self, source: str, origin: str) -> None:
        self._source, self._origin = source, origin
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        if len(source) > MOST_TEMPLATE_CHARACTERS:
            raise self._error("broken", f"it has {len(source)} characters, more than {MOST_TEMPLATE_CHARACTERS}")
        try:
            environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as e:
            raise self._error("broken", str(e)) from e

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """The prompt's text, up to where the assistant's answer begins. `values` are more names, or other values."""
        values = {"messages": list(messages), "add_generation_prompt": True, "tools": None, **values}
        with self._lock:
            if self._process is None:
                self._process = self._start()
                self._ask(self._process, self._source)
            return self._ask(self._process, values)

    def _start(self) -> subprocess.Popen[str]:
        limits = (MOST_TEMPLATE_SECONDS, MOST_TEMPLATE_BYTES, MOST_PROMPT_CHARACTERS)
        command = [sys.executable, "-P", str(_WORKER), *map(str, limits)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                process_group=0,  # Ctrl-C is for this process
            )
        except OSError as e:
            raise MegakernelError(f"cannot start a process for the chat template: {e.strerror}") from e
        weakref.finalize(self, _end, process)
        return process

    def _ask(self, process: subprocess.Popen[str], values: object) -> str:
        """The text that the process answers. A process that has ended, or is left in the middle, is not asked again."""
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
                raise self._error("failed", f"it computes for more than {MOST_TEMPLATE_SECONDS} s")
            raise self._error("failed", f"it needs more than {MOST_TEMPLATE_BYTES >> 20} MiB, or its process was ended")
        [(kind, text)] = json.loads(line).items()
        if kind == "broken":
            _end(process)
        else:
            self._process = process
        if kind != "text":
            raise self._error(kind, text)
        return str(text)

    def _error(self, how: str, why: str) -> MegakernelError:
        return MegakernelError(f"the chat template of {self._origin} {'is ' * (how == 'broken')}{how}: {why}")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # of what was still to be written
            pipe.close()
    process.wait()
