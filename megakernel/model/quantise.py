"""Quantises float32 weights to GGML's block types."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..isa import Dtype, from_f32
from ..isa.dtypes import BLOCKS

_ROWS = 1 << 22  # weights quantised at a time; the limit keeps temporary arrays small
F32 = NDArray[np.float32]


def quantise(a: F32, dtype: Dtype) -> NDArray[np.uint8]:
    """Quantise float32 rows [rows, weights] to blocks, uint8 [rows, bytes]. Zeros complete the last block of a row.

    Types with 32 weights per block are rounded as in the package gguf. For types with 256 weights per block, each scale
    is derived from the range of its weights, without llama.cpp's search for a better scale.
    """
    block = BLOCKS[dtype]
    out = np.empty((len(a), dtype.row_bytes(a.shape[1])), np.uint8)
    step = max(1, _ROWS // max(1, a.shape[1]))
    for start in range(0, len(a) if a.size else 0, step):
        rows = a[start : start + step]
        missing = -rows.shape[1] % block.weights
        padded = np.pad(rows, [(0, 0), (0, missing)]) if missing else rows
        out[start : start + step] = _quantise(padded, dtype).reshape(len(rows), -1)
    return out


def _quantise(a: F32, dtype: Dtype) -> NDArray[np.uint8]:
    if dtype is Dtype.Q6_K:
        return _q6_k(a.reshape(-1, 16, 16))
    if dtype in (Dtype.Q4_K, Dtype.Q5_K):
        return _with_minimum(a.reshape(-1, 8, 32), 4 if dtype is Dtype.Q4_K else 5)
    return from_f32(a, dtype).view(np.uint8)


def _half(a: F32) -> tuple[NDArray[np.uint8], F32]:
    """Round to float16. Return the bytes of the rounded values, and these values as float32."""
    half = a.astype("<f2")
    return half.view(np.uint8).reshape(len(a), 2), half.astype(np.float32)[:, None]


def _steps(a: F32, scale: F32) -> F32:
    return np.rint(np.divide(a, scale, out=np.zeros_like(a), where=scale != 0))


def _with_minimum(a: F32, bits: int) -> NDArray[np.uint8]:
    """Quantise to Q4_K or Q5_K: weight = (d * scale) * q - dmin * minimum, where scale and minimum have 6 bits."""
    low = np.minimum(a.min(axis=-1), 0)
    high = np.maximum(a.max(axis=-1), 0)
    top = (1 << bits) - 1
    d_bytes, d = _half((high - low).max(axis=-1) / (63 * top))
    dmin_bytes, dmin = _half(-low.min(axis=-1) / 63)
    scale = np.clip(_steps((high - low) / top, np.broadcast_to(d, low.shape)), 0, 63)
    minimum = np.clip(_steps(-low, np.broadcast_to(dmin, low.shape)), 0, 63)
    steps = np.broadcast_to((d * scale)[..., None], a.shape)
    q = np.clip(_steps(a + (dmin * minimum)[..., None], steps), 0, top).astype(np.uint8)
    s, m = scale.astype(np.uint8), minimum.astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
    low_bits = (q[:, 0::2] & 15 | q[:, 1::2] << 4).reshape(len(a), -1)
    high_bits = [np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)] if bits == 5 else []
    return np.concatenate([d_bytes, dmin_bytes, *packed, *high_bits, low_bits], axis=-1)


def _q6_k(a: F32) -> NDArray[np.uint8]:
    """Quantise to Q6_K: weight = (d * scale) * (q - 32). Every 16 weights share a scale, which is a signed byte."""
    peak = np.abs(a).max(axis=-1)
    d_bytes, d = _half(peak.max(axis=-1) / (31 * 127))
    scale = np.clip(_steps(peak / 31, np.broadcast_to(d, peak.shape)), 0, 127)
    steps = np.broadcast_to((d * scale)[..., None], a.shape)
    q = (np.clip(_steps(a, steps), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([q[:, :, :2] & 15 | q[:, :, 2:] << 4], axis=2).reshape(len(a), -1)
    high = np.bitwise_or.reduce(q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2).reshape(len(a), -1)
    return np.concatenate([low, high, scale.astype(np.int8).view(np.uint8), d_bytes], axis=-1)
