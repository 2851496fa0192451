"""The roles of the Hopper interpreter on threads, under a race detector: an ordering that nobody asked for is a race."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from protocol import LaunchImage, build_fibres, build_threads
from test_protocol import make, results, same

from megakernel.scheduler import Options


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    built = subprocess.run(["g++", "-fsanitize=thread", str(empty), "-o", str(folder / "empty")], capture_output=True)
    if built.returncode or subprocess.run([str(folder / "empty")], capture_output=True).returncode:
        pytest.skip("ThreadSanitizer does not work here")
    return build_threads(folder)
