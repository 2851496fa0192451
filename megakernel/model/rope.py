"""Computes RoPE's inverse frequencies, with the scaling for which a model was trained."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .config import Rope, RopeKind


def inverse_frequencies(rope: Rope, head_dim: int) -> NDArray[np.float32]:
    """Return RoPE's inverse frequencies, theta ** (-2i / head_dim) for i < head_dim / 2, scaled as `rope` says, as a
    float32 array [head_dim / 2].

    Every operation rounds to float32, in the order of Hugging Face's `modeling_rope_utils`, so that positions far into
    a context get the same rotation as in Hugging Face's code. The power is the only exception: this function rounds it
    correctly, while Hugging Face's result is within one unit in the last place. Llama 3's scaling follows "The Llama 3
    Herd of Models" (2024) and Meta's `apply_scaling`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.power(np.float64(np.float32(rope.theta)), exponent.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / power
    if rope.kind is RopeKind.LINEAR:
        return frequencies / np.float32(rope.factor)
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, frequencies)
    if rope.kind is RopeKind.FACTORS:
        factors: NDArray[np.float32] = np.array(rope.factors, dtype=np.float32)
        return frequencies / factors
    return frequencies


def _llama3(rope: Rope, frequencies: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide frequencies of long wavelengths by `factor`, keep those of short ones, and interpolate in between."""
    context, factor = rope.original_context, np.float32(rope.factor)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    # Torch computes number / tensor as the reciprocal of the tensor times the number, and so does this code.
    wavelength = np.float32(1) / frequencies * np.float32(2 * math.pi)
    long = wavelength > np.float32(context / low)
    medium = ~long & ~(wavelength < np.float32(context / high))
    scaled = np.where(long, frequencies / factor, frequencies)
    smooth = (np.float32(1) / wavelength * np.float32(context) - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    return np.where(medium, blended, scaled)
