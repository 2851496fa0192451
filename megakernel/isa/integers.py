"""Multiplies quantised weights with activations that are rounded to integers (`--activations q8`).

A row of activations is rounded in units of 32 elements, which share a scale. The few largest elements would make the
scale coarse for all others. So the two words (four elements each) with the largest magnitudes have 15 bits per element.
The scale is chosen so that the other 24 elements fit into 8 bits.

Weights that share a scale form a group: 32 weights, or 16 for Q6_K. The integer products of a group are added exactly,
so their order does not matter. The groups are then added from the first to the last: acc = fma(sum, weights' scale *
activations' scale, acc). If the weights' type has minima, acc = fma(activations' scale * sum of the activations'
integers, minimum, acc) follows. csrc/cpu/simd/integers.h is the fast version of this module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dtypes import BLOCKS, Block, Dtype, Fields

UNIT = 32  # neighbouring elements of a row of activations that share a scale
WORD = 4  # neighbouring elements of a unit that have the same number of bits
WIDE_WORDS = 2  # words of a unit that have 15 bits per element
_TINY = np.float32(2.0**-100)  # if all elements of a unit are smaller than this, they become zero

F32 = NDArray[np.float32]


class Rounded(NamedTuple):
    """Rounded activations: `values` [rows, units, UNIT] are integers, `scale` is [rows, units].

    Of each unit, WIDE_WORDS groups of WORD integers are from -16,256 to 16,256, and the others from -127 to 127."""

    values: NDArray[np.int64]
    scale: F32


class Codes(NamedTuple):
    """Quantised weights as integers: weight = scale * value + offset.

    Neighbouring weights of a row that share a scale form a group. `values` has the shape [rows, groups, weights per
    group]. `scale` has the shape [rows, groups]. `offset` has this shape too, or is None for types without minima.
    """

    values: NDArray[np.int64]
    scale: F32
    offset: F32 | None = None


def rounded(a: F32) -> Rounded:
    """Round float32 activations [rows, inner] to integers. Zeros fill up the last unit of 32 elements."""
    units = np.pad(a, [(0, 0), (0, -a.shape[1] % UNIT)]).reshape(len(a), -1, UNIT)
    # Magnitudes are compared without their lowest four bits. Of equal words (4 elements each), the first get 15 bits.
    words = (np.abs(units).view(np.uint32) | 15).reshape(*units.shape[:2], -1, WORD).max(axis=3)
    order = np.argsort(-words.astype(np.int64), axis=2, kind="stable")
    largest, others = (np.take_along_axis(words, order, 2)[..., at].view(np.float32) for at in (0, WIDE_WORDS))
    finite = np.isfinite(largest)
    some = finite & (largest >= _TINY)
    safe = np.where(some, largest, np.float32(1))
    limit = np.maximum(np.where(some, others, 0), safe / np.float32(128))
    inverse = np.where(some, np.float32(127) / limit, np.float32(0))
    scale = np.where(some, limit / np.float32(127), np.where(finite, np.float32(0), np.float32(np.nan)))
    exact = np.where(finite[..., None], units, 0).astype(np.float64) * inverse[..., None]
    return Rounded(np.rint(exact).astype(np.int64), scale)


def multiply(a: Rounded, w: Codes) -> F32:
    """The dot products of all rows of activations with all rows of weights, as float32 [rows of a, rows of w]."""
    each = w.values.shape[2]
    groups = a.values.reshape(len(a.values), -1, each)
    acc = np.zeros((len(groups), len(w.values)), np.float32)
    with np.errstate(invalid="ignore"):
        for g in range(min(groups.shape[1], w.values.shape[1])):
            # The sums are below 2^53, so float64 is exact. NumPy multiplies float64 much faster than integers.
            sums = groups[:, g].astype(np.float64) @ w.values[:, g].T.astype(np.float64)
            scale = a.scale[:, g * each // UNIT, None]
            acc = _fma(sums.astype(np.float32), w.scale[:, g] * scale, acc)
            if w.offset is not None:
                total = groups[:, g].sum(axis=1, keepdims=True).astype(np.float32)
                acc = _fma(np.broadcast_to(scale * total, acc.shape), w.offset[:, g], acc)
    return acc


def _fma(a: F32, b: F32, c: F32) -> F32:
    """Return a * b + c, rounded once to float32, as a fused multiply-add does. The product is exact in float64, but the
    sum is not. The sum is therefore rounded to odd in float64; only then does rounding it again, to float32, give the
    right result."""
    product, c64 = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # the product is exact
    total = product + c64
    back = total - product
    error = (product - (total - back)) + (c64 - back)
    bits = total.view(np.int64)
    odd = np.where(error == 0, bits, np.where((error > 0) == (total > 0), bits | 1, (bits - 1) | 1))
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def codes(rows: NDArray[np.uint8], dtype: Dtype) -> Codes:
    """Decode rows of quantised blocks, uint8 [rows, bytes], to integers and scales."""
    block, shape = BLOCKS[dtype], (len(rows), -1)
    blocks = rows.reshape(-1, block.bytes)
    values = _fields(blocks, block, block.low) | _fields(blocks, block, block.high) << block.low.width
    halves = [np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32) for at in block.scales]
    if dtype is Dtype.MXFP4:
        values, halves = _DOUBLED[values], [np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)]
    else:
        values = values.view(np.int8) - np.int8(block.zero)
    if dtype is Dtype.Q6_K:
        halves[0] = halves[0] * blocks[:, 192:208].view(np.int8)
    if dtype in (Dtype.Q4_K, Dtype.Q5_K):
        # The scales and the minima of the eight groups, 6 bits each, are packed into 12 bytes.
        first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
        scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
        minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
        halves = [halves[0] * scales, halves[1] * -minima.astype(np.float32)]
    scale, *offsets = (half.reshape(shape) for half in halves)
    each = block.weights // halves[0].shape[1]
    return Codes(values.astype(np.int64).reshape(*shape, each), scale, *offsets)


def _fields(blocks: NDArray[np.uint8], block: Block, fields: Fields) -> NDArray[np.uint8]:
    """Unpack bit fields of blocks, uint8 [blocks, bytes], to one integer per weight. Without fields, all are 0."""
    if not fields.width:
        return np.zeros((len(blocks), block.weights), np.uint8)
    shifts = np.arange(0, 8, fields.width, dtype=np.uint8)[:, None]
    end = fields.offset + block.weights * fields.width // 8
    packed = blocks[:, fields.offset : end].reshape(len(blocks), -1, 1, fields.run)
    out: NDArray[Any] = (packed >> shifts & (1 << fields.width) - 1).reshape(len(blocks), -1)
    return out


# Twice the values of 4-bit floats, because some values are not integers.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
