"""Storage types and their conversions. bfloat16 lives in uint16 arrays: NumPy has no such type."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Dtype(IntEnum):
    F32 = 0
    BF16 = 1
    I32 = 2

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return np.dtype((np.float32, np.uint16, np.int32)[self])

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize


def to_f32(a: NDArray[np.generic]) -> NDArray[np.float32]:
    """float32 values of a float32 array or of bfloat16 bits in a uint16 array."""
    if a.dtype == np.uint16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32, copy=False)


def from_f32(a: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """Round float32 values to `dtype` (nearest, ties to even; NaN stays NaN)."""
    if dtype is Dtype.F32:
        return np.ascontiguousarray(a, dtype=np.float32)
    if dtype is not Dtype.BF16:
        raise ValueError(f"no float storage in {dtype.name}")
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(a), np.uint32(0x7FC0), rounded).astype(np.uint16)
