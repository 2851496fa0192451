"""Types of stored numbers, and conversions. NumPy arrays store bfloat16 as uint16, and quantised rows as uint8."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Dtype(IntEnum):
    """The types of stored numbers. The types from Q8_0 on are GGML's quantised blocks. Types after I32 are used for
    weight matrices, and Q8_0 also for K and V."""

    F32 = 0
    BF16 = 1
    I32 = 2
    F16 = 3
    Q8_0 = 4
    Q4_0 = 5
    Q4_1 = 6
    Q5_0 = 7
    Q5_1 = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    MXFP4 = 12

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype of an array that stores elements or blocks of this type."""
        plain = {Dtype.F32: np.float32, Dtype.BF16: np.uint16, Dtype.I32: np.int32, Dtype.F16: np.float16}
        return np.dtype(plain.get(self, np.uint8))

    @property
    def quantised(self) -> bool:
        return self in BLOCKS

    @property
    def itemsize(self) -> int:
        """The number of bytes per element. The type must not be quantised."""
        return self.numpy.itemsize

    @property
    def bits(self) -> float:
        """The number of bits per element, including the element's share of its block's scales."""
        block = BLOCKS.get(self)
        return 8.0 * (block.bytes / block.weights if block else self.itemsize)

    def row_bytes(self, elements: int) -> int:
        """The number of bytes that a row of a matrix takes. A partly filled last block counts as a whole block."""
        block = BLOCKS.get(self)
        return -(-elements // block.weights) * block.bytes if block else elements * self.itemsize


class Fields(NamedTuple):
    """Where a quantised block has integers of `width` bits: from byte `offset` on. In every `run` bytes, the
    lowest bits of each byte are the first `run` integers, the next bits are the next `run`, and so on."""

    offset: int
    width: int
    run: int


class Block(NamedTuple):
    """The layout of a quantised block: neighbouring weights that share a scale.

    `scales` has the byte offset of the block's float16 scale. In types with a float16 minimum, `scales` also has the
    minimum's offset. All other bytes are integers. MXFP4 differs: its block is an exponent and then 4-bit floats.
    `low` has the lowest bits of the weights' integers, and `high` has the others, if there are more.
    """

    weights: int
    bytes: int
    scales: tuple[int, ...]
    low: Fields
    high: Fields = Fields(0, 0, 0)

    @property
    def zero(self) -> int:
        """The number to subtract from stored integers: 0 in types with a minimum, and in types with signed integers."""
        bits = self.low.width + self.high.width
        return 0 if len(self.scales) == 2 or bits == 8 else 1 << bits - 1


BLOCKS = {
    Dtype.Q8_0: Block(32, 34, (0,), Fields(2, 8, 32)),
    Dtype.Q4_0: Block(32, 18, (0,), Fields(2, 4, 16)),
    Dtype.Q4_1: Block(32, 20, (0, 2), Fields(4, 4, 16)),
    Dtype.Q5_0: Block(32, 22, (0,), Fields(6, 4, 16), Fields(2, 1, 1)),
    Dtype.Q5_1: Block(32, 24, (0, 2), Fields(8, 4, 16), Fields(4, 1, 1)),
    Dtype.Q4_K: Block(256, 144, (0, 2), Fields(16, 4, 32)),
    Dtype.Q5_K: Block(256, 176, (0, 2), Fields(48, 4, 32), Fields(16, 1, 32)),
    Dtype.Q6_K: Block(256, 210, (208,), Fields(0, 4, 64), Fields(128, 2, 32)),
    Dtype.MXFP4: Block(32, 17, (), Fields(1, 4, 16)),
}
_INFINITY = {Dtype.F32: 0x7F800000, Dtype.BF16: 0x7F80, Dtype.F16: 0x7C00}


def all_finite(a: NDArray[np.generic], dtype: Dtype) -> bool:
    """Return whether an array contains neither NaN nor infinity. If `dtype` is quantised, it has rows of blocks.

    The bits of floats are compared as integers, which is ten times as fast as NumPy's `isfinite`. As integers, NaN and
    infinity are greater than all finite floats of the same sign. So it is enough to look at the maximum for each sign.
    """
    if dtype.quantised:
        blocks = a.view(np.uint8).reshape(-1, BLOCKS[dtype].bytes)
        if dtype is Dtype.MXFP4:
            return not (blocks[:, 0] > 252).any()  # with a larger exponent, the largest value (6) is infinite
        scales = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16) for at in BLOCKS[dtype].scales)
        return all(all_finite(scale, Dtype.F16) for scale in scales)
    signed, unsigned, most = np.dtype(f"i{a.itemsize}"), np.dtype(f"u{a.itemsize}"), _INFINITY[dtype]
    negative = most | 1 << 8 * a.itemsize - 1
    return a.size == 0 or (int(a.view(signed).max()) < most and int(a.view(unsigned).max()) < negative)


def to_f32(a: NDArray[np.generic], dtype: Dtype | None = None) -> NDArray[np.float32]:
    """Return the values of an array of `dtype` as float32. Without `dtype`, the array must contain floats, or bfloat16
    values stored as uint16.

    Rows of quantised blocks, `[..., bytes]`, become rows of float32 weights. A weight is scale * value + offset,
    rounded once.
    """
    if dtype is not None and dtype.quantised:
        # Imported here, because the package gguf may be missing on a machine that runs only unquantised models.
        from gguf import GGMLQuantizationType, dequantize

        values: NDArray[np.float32] = dequantize(a, GGMLQuantizationType[dtype.name])
        return values
    if a.dtype == np.uint16:
        wide = a.astype(np.uint32)
        wide <<= 16  # in place, because huge arrays are slow to allocate
        return wide.view(np.float32)
    return a.astype(np.float32, copy=False)


def from_f32(a: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """Round float32 values to `dtype`, to nearest with ties to even. NaN stays NaN. If `dtype` is quantised, each row
    must be a whole number of blocks."""
    if dtype is Dtype.F32:
        return np.ascontiguousarray(a, dtype=np.float32)
    if dtype is Dtype.F16:
        with np.errstate(over="ignore"):
            return a.astype(np.float16)
    if dtype is not Dtype.BF16:
        from gguf import GGMLQuantizationType, quantize

        blocks: NDArray[np.uint8] = quantize(a, GGMLQuantizationType[dtype.name])
        return blocks
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # in place, because huge arrays are slow to allocate
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    narrow = rounded.astype(np.uint16)
    if (nan := np.isnan(a)).any():
        narrow[nan] = 0x7FC0
    return narrow
