"""Works on many lists of different lengths, stored one after another in flat arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ragged(counts: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays with an entry for each element of several lists, which are stored one after another. The first
    has the number of the element's list, the second the element's index in it. `counts` has the length of each list."""
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
