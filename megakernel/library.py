"""Finds the native library. The modules that call it declare its functions."""

from __future__ import annotations

import ctypes
import functools
from importlib.metadata import distributions
from pathlib import Path

from .errors import MegakernelError

_FILE = "megakernel/_native.so"


@functools.cache
def load() -> ctypes.CDLL:
    """Load the native library and return it. Calls into the library release the GIL."""
    # If the package is imported from a checkout that has no library, the library of an installed package is used.
    installed = (Path(str(found.locate_file(_FILE))) for found in distributions(name="megakernel"))
    for path in (Path(__file__).parents[1] / _FILE, *installed):
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as e:
                raise MegakernelError(f"cannot load the native library ({e}): install the package again") from e
    raise MegakernelError("the native library is not built: run `pip install .` in the checkout")
