"""Checkpoints with a public model's shape and seeded random weights: for speed, where any numbers do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..isa import BIASES, BUFFERS, Buffer, Dtype, to_f32
from .checkpoint import weight_dims
from .config import LlamaConfig, Rope, RopeKind
from .rope import inverse_frequencies


def _llama3(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, factor: float, tied: bool
) -> LlamaConfig:
    rope = Rope(500000.0, RopeKind.LLAMA3, factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return LlamaConfig(128256, hidden, ffn, layers, heads, kv_heads, head_dim, 131072, 1e-5, rope, tied)


# From the models' own config.json. No end-of-text ids: random weights have nothing to end.
KNOWN_SHAPES: dict[str, LlamaConfig] = {
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, 64, 32.0, True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 8, 128, 32.0, True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8, 128, 8.0, False),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8, 128, 8.0, False),
    "smollm2-135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, Rope(100000.0), True),
}

# Random bits become bfloat16 by fixing the upper exponent bits: sign, lowest exponent bit and mantissa stay random,
# the magnitude lies in [2^-7, 2^-5). Deviation 0.019, near the 0.02 that Llamas are initialised with.
_KEEP, _SET = np.uint64(0x80FF80FF80FF80FF), np.uint64(0x3C003C003C003C00)
_ALL = (1 << 64) - 1
_CHUNK = 1 << 18  # words of four weights


class RandomCheckpoint:
    """A Checkpoint of bfloat16 weights (and biases) with log-uniform magnitudes and random signs; norms are 1.

    Activations stay finite at any depth. Each buffer of each layer has its own stream, a pure function of (seed,
    buffer, layer), so any one can be made alone, at the rate of the generator.
    """

    dtype = Dtype.BF16

    def __init__(self, name: str, config: LlamaConfig, seed: int = 0) -> None:
        self.name = name
        self.config = config
        self._seed = seed

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        """See Checkpoint."""
        if buffer is Buffer.INV_FREQ:
            return inverse_frequencies(self.config.rope, self.config.head_dim)
        if buffer is Buffer.LM_HEAD and self.config.tied:
            buffer = Buffer.EMBED
        spec = BUFFERS[buffer]
        dims = weight_dims(self.config, dtype)
        shape = spec.shape(dims, 0)
        if buffer in (Buffer.ATTN_NORM, Buffer.MLP_NORM, Buffer.FINAL_NORM):
            return np.ones(shape, dtype=np.float32)
        if buffer in BIASES and not getattr(self.config, BIASES[buffer]):
            return np.zeros(shape, dtype=np.float32)
        bits = self._draw(int(np.prod(shape)), buffer, layer if spec.layered else 0).reshape(shape)
        return bits if (dtype if spec.dtype is None else spec.dtype) is Dtype.BF16 else to_f32(bits)

    def _draw(self, count: int, buffer: Buffer, layer: int) -> NDArray[np.uint16]:
        generator = np.random.Generator(np.random.SFC64([self._seed, int(buffer), layer]))
        out = np.empty(count, dtype=np.uint16)
        for start in range(0, count, 4 * _CHUNK):
            part = out[start : start + 4 * _CHUNK]
            # The generator's words as they are; other threads run meanwhile, which random_raw does not let them.
            words = generator.integers(_ALL, size=-(-len(part) // 4), dtype=np.uint64, endpoint=True)
            words &= _KEEP
            words |= _SET
            part[:] = words.astype("<u8", copy=False).view("<u2")[: len(part)]
        return out
