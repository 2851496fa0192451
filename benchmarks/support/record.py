"""Writes benchmark results as JSON, together with the command and the machine that produced them."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

from megakernel.errors import whole_file
from megakernel.machine import cpu_count, processor


def options(doc: str | None, *, required: bool = False) -> argparse.ArgumentParser:
    """The parser of a script whose docstring is `doc`, with the flag -o for the file that `write` writes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = "write the figures to FILE as JSON"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=required, help=what)
    return parser


def made() -> dict[str, str]:
    """The command line of this process and the machine. The script's path is relative to the checkout's root.

    Of absolute paths only the file name is kept.
    """
    script = "/".join(Path(sys.argv[0]).resolve().parts[-3:])
    machine = f"{cpu_count()} cores, {processor()}, Python {platform.python_version()}"
    return {"command": " ".join(["python", script, *map(_without_folder, sys.argv[1:])]), "machine": machine}


def _without_folder(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write `figures` as JSON after the command and the machine. Does nothing if `path` is None."""
    if path:
        put(path, made() | figures)


def put(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` atomically: if the process ends meanwhile, the file keeps its old content."""
    with whole_file(path, f"figures to {path}") as part:
        part.write_text(text(figures) + "\n")


def text(value: Any, margin: str = "") -> str:
    """Format JSON with one line per run (an object in an array) and one line per field next to runs."""
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
