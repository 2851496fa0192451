"""Lists of different lengths as flat arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ragged(counts: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the elements of lists of the given lengths. Return for each element its list and its place in it."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
