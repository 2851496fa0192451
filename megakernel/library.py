"""Finds the native library. The modules that call it declare its functions."""

from __future__ import annotations

import ctypes
import functools
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from .errors import MegakernelError

_FILE = "megakernel/_native.so"


@functools.cache
def load() -> ctypes.CDLL:
    """The loaded library. Calls release the GIL."""
    path = Path(__file__).parents[1] / _FILE
    try:
        # A checkout that is imported from the current folder has no library of its own, so the installed one is used.
        return ctypes.CDLL(str(path if path.exists() else distribution("megakernel").locate_file(_FILE)))
    except PackageNotFoundError:
        raise MegakernelError("the native library is not built: run `pip install .` in the checkout") from None
    except OSError as e:
        raise MegakernelError(f"cannot load the native library ({e}): install the package again with a compiler") from e
