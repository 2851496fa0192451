"""Skips tests whose optional dependencies are not installed, and names the extra of the package that installs them."""

import pytest

# A package of each extra that tests look for.
_PACKAGES = {"cuda": "cuda.bindings.nvrtc", "ray": "ray", "sentencepiece": "sentencepiece"}
_REASON = "needs the extra {0}: pip install '.[{0}]'"


def needs(extra: str) -> None:
    """Skip the test, or the module if it is called at its top, unless the packages of `extra` are installed."""
    pytest.importorskip(_PACKAGES[extra], reason=_REASON.format(extra))


def lacks(extra: str) -> None:
    """Skip the test, because something that `extra` installs is missing."""
    pytest.skip(_REASON.format(extra))
