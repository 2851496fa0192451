"""Storage types and their conversions. bfloat16 lives in uint16 arrays, rows of quantised blocks in uint8 arrays."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

# Q8_0, as GGUF files have it: a float16 scale and 32 signed bytes; a weight is scale * byte.
Q8_0_WEIGHTS, Q8_0_BYTES = 32, 34


class Dtype(IntEnum):
    F32 = 0
    BF16 = 1
    I32 = 2
    Q8_0 = 3  # of weight matrices only

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return np.dtype((np.float32, np.uint16, np.int32, np.uint8)[self])

    @property
    def quantised(self) -> bool:
        return self is Dtype.Q8_0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a type that is not quantised."""
        return self.numpy.itemsize

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of a matrix; a part of a block at its end is stored whole."""
        return -(-elements // Q8_0_WEIGHTS) * Q8_0_BYTES if self.quantised else elements * self.itemsize

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array that holds a matrix of `shape`: rows of quantised blocks are bytes."""
        return (*shape[:-1], self.row_bytes(shape[-1])) if self.quantised else shape


def to_f32(a: NDArray[np.generic], dtype: Dtype | None = None) -> NDArray[np.float32]:
    """float32 values of an array of `dtype`; by default of floats, or of bfloat16 bits in a uint16 array."""
    if dtype is Dtype.Q8_0:
        blocks = a.reshape(*a.shape[:-1], -1, Q8_0_BYTES)
        scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
        return (scale * blocks[..., 2:].view(np.int8)).reshape(*a.shape[:-1], -1)
    if a.dtype == np.uint16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32, copy=False)


def from_f32(a: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """Round float32 values to `dtype` (nearest, ties to even; NaN stays NaN)."""
    if dtype is Dtype.F32:
        return np.ascontiguousarray(a, dtype=np.float32)
    if dtype is Dtype.Q8_0:
        return _q8_0(a)
    if dtype is not Dtype.BF16:
        raise ValueError(f"no float storage in {dtype.name}")
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(a), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _q8_0(a: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of blocks, the last one filled up with zeros. The largest weight of a block becomes 127 or -127."""
    spare = -a.shape[-1] % Q8_0_WEIGHTS
    padded = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, spare)]).reshape(*a.shape[:-1], -1, Q8_0_WEIGHTS)
    scale = (np.abs(padded).max(axis=-1, keepdims=True) / 127).astype("<f2")
    exact = scale.astype(np.float32)
    steps = np.divide(padded, exact, out=np.zeros_like(padded), where=exact > 0)
    values = np.clip(np.rint(steps), -127, 127).astype(np.int8)
    out = np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=-1)
    return out.reshape(*a.shape[:-1], -1)
