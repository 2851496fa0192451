"""Builds files for tests once per test run, and shares them among the processes of the run."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

NAME = "MEGAKERNEL_TESTS_BUILT"  # environment variable that passes the folder's path to child processes


@functools.cache
def folder() -> Path:
    """Return the folder of this run's built files. The process that creates it deletes it on exit."""
    if known := os.environ.get(NAME):
        return Path(known)
    made = tempfile.mkdtemp(prefix="megakernel-built-")
    atexit.register(shutil.rmtree, made)
    os.environ[NAME] = made
    return Path(made)


def built_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of the run's file `name`. If no process of the run has built this file yet, call `make` with the
    path to which it must write.
    """
    file, part = folder() / name, folder() / f"{name}.part"
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            make(part)
            part.rename(file)
    return file
