"""Computes the layout in shared memory of a tile that bulk copies (TMA) have loaded."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def copied_tile(tile: Array) -> Array:
    """Return the bytes in shared memory after bulk copies have loaded `tile` in boxes of 32 rows x 128 bytes. The
    copies apply the 128-byte swizzle: within each group of 8 rows, chunk i of row r is stored at position i XOR r. A
    chunk has 16 bytes."""
    rows = tile.view(np.uint8).reshape(-1, 128)
    out = np.empty_like(rows)
    for r, row in enumerate(rows):
        chunks = row.reshape(8, 16)
        out[r] = chunks[np.arange(8) ^ (r % 8)].reshape(128)
    return out.reshape(-1)
