"""Computes the frequencies of RoPE (rotary position embeddings), with the scaling for which a model was trained."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig, Rope, RopeKind


def rope_table(config: ModelConfig, layer: int = 0) -> NDArray[np.float32]:
    """Return the weights of the RoPE operation for a layer, float32 [2, head_dim / 2]. Row 0 has the inverse frequency
    of each RoPE pair; 0 means that the pair is not rotated. Contexts have at most `config.max_context` tokens.

    Row 1 has a factor for each pair's cosine and sine. The factors multiply q and k, and so can replace the usual
    multiplier of attention scores, 1 / sqrt(head_dim), by another.
    """
    table = np.tile(np.array([[0], [1]], np.float32), config.head_dim // 2)
    local = config.local_theta and layer not in config.full_layers
    rope = Rope(config.local_theta) if local else config.rope
    if layer not in config.nope_layers:
        frequencies = inverse_frequencies(rope, rope.dims or config.head_dim, config.max_context)
        table[0, : len(frequencies)], table[1, : len(frequencies)] = frequencies, rope.attention
    if config.attention_multiplier is not None:
        table[1] *= np.float32(math.sqrt(config.attention_multiplier * math.sqrt(config.head_dim)))
    return table


def inverse_frequencies(rope: Rope, head_dim: int, context: int | None = None) -> NDArray[np.float32]:
    """Return RoPE's inverse frequencies, float32 [head_dim / 2]. For pair i, this is theta ** (-2i / head_dim), scaled
    as `rope` says. `context` is the longest context in tokens (None: any); only LongRoPE uses it.

    Every operation rounds to float32, in the order of Hugging Face's `modeling_rope_utils`. So tokens far into a
    context are rotated by the same angle as there. Only the power may differ, by one unit in the last place: here it is
    correctly rounded. Llama 3's scaling follows "The Llama 3 Herd of Models" (2024) and Meta's `apply_scaling`."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.power(np.float64(np.float32(rope.theta)), exponent.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / power
    match rope.kind:
        case RopeKind.LINEAR:
            return frequencies / np.float32(rope.factor)
        case RopeKind.LLAMA3:
            return _llama3(rope, frequencies)
        case RopeKind.YARN:
            return _yarn(rope, power)
        case RopeKind.LONGROPE:
            short = context is not None and context <= rope.original_context
            factors: NDArray[np.float32] = np.array(rope.short_factors if short else rope.factors, np.float32)
            return np.float32(1) / (factors * power)
        case RopeKind.FACTORS:
            factors = np.array(rope.factors, np.float32)
            return frequencies / factors
    return frequencies


def _llama3(rope: Rope, frequencies: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale frequencies as Llama 3 does: divide those of long wavelengths by `factor`, keep those of short wavelengths,
    and interpolate between them."""
    context, factor = rope.original_context, np.float32(rope.factor)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    # Torch computes number / tensor as number * (1 / tensor). This code does the same, so that the rounding is equal.
    wavelength = np.float32(1) / frequencies * np.float32(2 * math.pi)
    long = wavelength > np.float32(context / low)
    medium = ~long & ~(wavelength < np.float32(context / high))
    scaled = np.where(long, frequencies / factor, frequencies)
    smooth = (np.float32(1) / wavelength * np.float32(context) - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    return np.where(medium, blended, scaled)


def _yarn(rope: Rope, power: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale frequencies as in "YaRN: Efficient Context Window Extension of Large Language Models" (2023). Low
    frequencies are divided by `factor`, and high ones stay the same. Between these, the result is interpolated linearly
    in the pair's number."""
    pairs = len(power)

    def pair(turns: float) -> float:
        """Return the number of the RoPE pair that turns `turns` times in the original context. It may be fractional."""
        return pairs * math.log(rope.original_context / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair(rope.high_freq_factor), pair(rope.low_freq_factor)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0.0
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept: NDArray[np.float32] = np.float32(1) - ramp.clip(0, 1)
    divided: NDArray[np.float32] = np.float32(1) / (np.float32(rope.factor) * power)
    frequencies: NDArray[np.float32] = divided * (np.float32(1) - kept) + np.float32(1) / power * kept
    return frequencies


def yarn_attention(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Return the factor by which YaRN multiplies cosines and sines. Only DeepSeek sets the last two arguments."""

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale > 0 and mscale_all_dim > 0 else of(1.0)
