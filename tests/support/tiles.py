"""Tiles as bulk copies leave them in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def copied_tile(tile: Array) -> Array:
    """Bytes in shared memory after bulk copies of boxes of 32 rows x 128 bytes of `tile` in the 128-byte swizzle:
    in each 8 rows of 128 bytes, row r has its 16-byte chunks exchanged by XOR with r."""
    rows = tile.view(np.uint8).reshape(-1, 128)
    out = np.empty_like(rows)
    for r, row in enumerate(rows):
        chunks = row.reshape(8, 16)
        out[r] = chunks[np.arange(8) ^ (r % 8)].reshape(128)
    return out.reshape(-1)
