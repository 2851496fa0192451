"""Writes files of figures, together with the command line that made them, the machine on which it ran, the date and the
commit."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from shutil import which
from typing import Any

from megakernel.errors import whole_file
from megakernel.machine import cpu_count, processor


def options(
    doc: str | None, *, required: bool = False, what: str = "write the figures to FILE as JSON"
) -> argparse.ArgumentParser:
    """Return a command-line parser with the option -o for the output file. The docstring `doc` is its description."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=required, help=what)
    return parser


def made() -> dict[str, str]:
    """Describe how the figures were made: by which command line, on which machine, when, and by which commit.

    The script's path is relative to the checkout. Of each absolute path in the arguments, only the last part is kept.
    """
    script = "/".join(Path(sys.argv[0]).resolve().parts[-3:])
    machine = f"{cpu_count()} cores, {processor()}, Python {platform.python_version()}"
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    commit = which("git") and subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    command = " ".join(["python", script, *map(_without_folder, sys.argv[1:])])
    return {"command": command, "machine": machine, "recorded": f"{date.today()}, commit {commit or 'unknown'}"}


def _without_folder(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the command, the machine and `figures` to the file `path` as JSON. Without a path, do nothing."""
    if path:
        put(path, made() | figures)


def put(path: Path, figures: dict[str, Any]) -> None:
    """Write figures to a file atomically: if this process ends during the write, the file keeps its old contents."""
    with whole_file(path, f"figures to {path}") as part:
        part.write_text(text(figures) + "\n")


def text(value: Any, margin: str = "") -> str:
    """Format a record as JSON, with one line for each run (an object in an array) and one for each other field."""
    inner = margin + " "
    if isinstance(value, dict) and (not margin or _holds_runs(value)):
        lines = [f"{json.dumps(str(name))}: {text(field, inner)}" for name, field in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{margin}}}"
    if isinstance(value, list) and _holds_runs(value):
        return "[\n" + ",\n".join(inner + json.dumps(run) for run in value) + f"\n{margin}]"
    return json.dumps(value)


def _holds_runs(value: Any) -> bool:
    if not isinstance(value, list | dict):
        return False
    fields = list(value) if isinstance(value, list) else list(value.values())
    alike = bool(fields) and all(isinstance(field, dict) for field in fields)
    return alike or (isinstance(value, dict) and any(_holds_runs(field) for field in fields))
