"""What a committed figure has beside it: the command, the machine, the raw runs."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

from megakernel.machine import cpu_count, processor


def machine_line() -> str:
    return f"{cpu_count()} cores, {processor()}, Python {platform.python_version()}"


def command() -> str:
    """The command line of this process, with its script as it is named from the root of a checkout."""
    return " ".join(["python", "/".join(Path(sys.argv[0]).resolve().parts[-3:]), *sys.argv[1:]])


def write(path: Path, figures: dict[str, Any]) -> None:
    """`figures` as JSON, after the command that made them and the machine that ran it."""
    path.write_text(json.dumps({"command": command(), "machine": machine_line()} | figures, indent=1) + "\n")
