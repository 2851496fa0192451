"""Compiles and loads C++ code that only tests call."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def build(source: str, target: Path, *flags: str) -> ctypes.CDLL:
    """Compile `source`, a file in this folder, to a library in the folder `target`, and load it.

    Skips the test if there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = target / f"{Path(source).stem}.so"
    command = [*compiler.split(), *FLAGS, *flags, str(ROOT / "tests" / "support" / source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))
