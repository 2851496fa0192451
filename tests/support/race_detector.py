"""Checks whether ThreadSanitizer works on this machine."""

import subprocess
from pathlib import Path

import pytest


def need_race_detector(folder: Path) -> None:
    """Skip the test if an empty program with ThreadSanitizer cannot be built in `folder` or cannot run."""
    source, command = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    for step in (["g++", "-fsanitize=thread", str(source), "-o", str(command)], [str(command)]):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"ThreadSanitizer does not work here: {done.stderr.strip()[:200]}")
