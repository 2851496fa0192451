"""Skips tests whose optional dependencies are not installed, and names the extra of the package that installs them."""

from importlib.util import find_spec

import pytest

# A package of each extra that tests look for.
_PACKAGES = {"cuda": "cuda.bindings.nvrtc", "ray": "ray", "sentencepiece": "sentencepiece"}


def needs(extra: str) -> None:
    """Skip the test, or the module if it is called at its top, unless the packages of `extra` are installed."""
    try:
        installed = find_spec(_PACKAGES[extra]) is not None
    except ModuleNotFoundError:  # a package that would contain the package is missing
        installed = False
    if not installed:
        lacks(extra)


def lacks(extra: str) -> None:
    """Skip the test, or the module if it is called at its top, because something that `extra` installs is missing."""
    pytest.skip(f"needs the extra {extra}: pip install '.[{extra}]'", allow_module_level=True)
