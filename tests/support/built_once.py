"""What tests compile, once for all processes of a run."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

NAME = "MEGAKERNEL_TESTS_BUILT"  # tells processes that this one starts where the folder is


@functools.cache
def folder() -> Path:
    """Of this run; the process that calls this first removes it in the end."""
    if known := os.environ.get(NAME):
        return Path(known)
    made = tempfile.mkdtemp(prefix="megakernel-built-")
    atexit.register(shutil.rmtree, made)
    os.environ[NAME] = made
    return Path(made)


def built_once(name: str, make: Callable[[Path], None]) -> Path:
    """The file `name` of the run, which `make` writes where no process of the run has done so."""
    file, part = folder() / name, folder() / f"{name}.part"
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            make(part)
            part.rename(file)
    return file
