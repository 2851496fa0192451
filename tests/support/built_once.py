"""Builds files for tests once for each content of their sources, and shares them among processes and test runs. The
files are in the folder `megakernel-tests` of the user's cache folder. The least recently used ones are deleted."""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WARNINGS = ("-Wall", "-Wextra", "-Werror")
_KEPT = 100  # files; a test run uses about a quarter as many


def built_once(name: str, content: bytes, make: Callable[[Path], None]) -> Path:
    """Return the path of a file or folder called `name`. `content` is everything on which the file depends. If no
    process has made the file from this content yet, call `make` with the path at which to make it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel-tests"
    folder = cache / hashlib.sha256(content).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    file, part = folder / name, folder / f"{name}.part"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(folder)
        if not file.exists():
            for old in sorted(cache.iterdir(), key=lambda entry: entry.stat().st_mtime)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
            make(part)
            part.rename(file)
    return file


def linked(name: str, source: Path, *flags: str) -> Path:
    """Compile a C++ source to the library or command `name` with `flags`. Skips the test if there is no compiler."""
    command = [*compiler(), "-std=c++20", *flags, str(source)]
    content = " ".join((version(), *flags)).encode() + source.read_bytes() + sources(ROOT)
    return built_once(name, content, lambda target: run([*command, "-o", str(target)]))


def library(source: Path, *flags: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(linked(f"{source.stem}.so", source, *WARNINGS, "-fPIC", "-shared", *flags)))


@functools.cache
def sources(tree: Path) -> bytes:
    """A hash of the names and contents of all C++ files of a source tree, wherever the tree lies."""
    digest = hashlib.sha256()
    for folder in ("csrc", "tests"):
        for path in sorted((tree / folder).rglob("*")):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
                digest.update(f"{path.relative_to(tree)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.digest()


def compiler() -> list[str]:
    """The command of the C++ compiler. Skips the test if there is none."""
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if command is None:
        pytest.skip("needs a C++ compiler")
    return command.split()


@functools.cache
def version() -> str:
    """The compiler's version, and the kind of processor for which it compiles."""
    return subprocess.run([*compiler(), "-v"], capture_output=True, text=True, check=True).stderr


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
