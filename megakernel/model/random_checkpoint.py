"""Generates random weights in the shape of a public model, to measure speed without downloading the model."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..isa import BUFFERS, Buffer, Dtype, Split, column_share, row_shares
from ..isa.buffers import weight
from .checkpoint import Storage, WeightRows, converted, cut, vector
from .config import ModelConfig, Rope, RopeKind
from .rope import rope_table, yarn_attention


def _llama3(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, tied: bool) -> ModelConfig:
    factor = 32.0 if tied else 8.0  # the small models, of Llama 3.2, have tied embeddings
    rope = Rope(500000.0, RopeKind.LLAMA3, factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return ModelConfig(128256, hidden, ffn, layers, heads, kv_heads, head_dim, 131072, 1e-5, rope, tied)


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    yarn = Rope(150000.0, RopeKind.YARN, 32.0, 1.0, 32.0, 4096, truncate=False, attention=yarn_attention(32.0))
    config = ModelConfig(201088, 2880, 2880, layers, 64, 8, 64, 131072, 1e-5, yarn, family="gpt_oss", experts=experts)
    biases: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    gates: dict[str, Any] = {"experts_per_token": 4, "normalised_routes": True, "clipped_gates": True}
    return replace(config, window=128, full_layers=tuple(range(1, layers, 2)), **biases, **gates)


def _routed(family: str, experts: int, per_token: int, *sizes: Any) -> ModelConfig:
    config = ModelConfig(*sizes)
    return replace(config, family=family, experts=experts, experts_per_token=per_token, normalised_routes=True)


# The configurations of public models, without end-of-text ids, because text from random weights has no meaningful end.
KNOWN_SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, 64, True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 8, 128, True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8, 128, False),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8, 128, False),
    "smollm2-135m": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, Rope(100000.0), True),
    "mistral-7b": ModelConfig(32768, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, Rope(1000000.0), family="mistral"),
    "qwen3-0.6b": ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, Rope(1000000.0), True, "qwen3"),
    "qwen3-30b-a3b": _routed("qwen3_moe", 128, 8, 151936, 2048, 768, 48, 32, 4, 128, 40960, 1e-6, Rope(1000000.0)),
    "mixtral-8x7b": _routed("mixtral", 8, 2, 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, Rope(1000000.0)),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen2.5-0.5b": ModelConfig(
        151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, Rope(1000000.0), True, "qwen2", qkv_bias=True
    ),
}

# Masks that turn random bits into bfloat16 weights. The sign, the mantissa and the lowest bit of the exponent stay
# random; all other bits are fixed. So magnitudes lie in [2^-7, 2^-5). The standard deviation is 0.019, close to the
# 0.02 with which Llama is initialised.
_KEEP, _SET = np.uint64(0x80FF80FF80FF80FF), np.uint64(0x3C003C003C003C00)
_ALL = (1 << 64) - 1
_CHUNK = 1 << 18  # 64-bit words generated at a time; each has the bits of four weights


class RandomCheckpoint:
    """A Checkpoint of random bfloat16 weights and biases, with magnitudes in [2^-7, 2^-5) and random signs. Activations
    stay finite at any depth.

    Norm weights are float32, uniform in [0.5, 1.5). If all were 1, a test could not notice that a norm uses another
    norm's weights. Each layer of a buffer has its own random stream, which depends only on (seed, buffer, layer). So
    any buffer can be generated alone.
    """

    dtype = Dtype.BF16

    def __init__(self, name: str, config: ModelConfig, seed: int = 0) -> None:
        self.name = name
        self.config = config
        self.storage: dict[Buffer, Storage] = {}
        self._seed = seed
        self._last = threading.local()

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        if buffer is Buffer.INV_FREQ:
            return [vector(rope_table(self.config, layer))]
        whole = self._whole(Buffer.EMBED if buffer is Buffer.LM_HEAD and self.config.tied else buffer, layer, split)
        rows = cut([whole], buffer, split)
        return converted(rows, column_share(buffer, split).size, BUFFERS[buffer].resolve_dtype(split.model))

    def _whole(self, buffer: Buffer, layer: int, split: Split) -> WeightRows:
        """Generate all rows of a buffer. A thread keeps its last result, because the next rank needs the same rows."""
        key = buffer, layer if BUFFERS[buffer].layered else 0
        made: tuple[object, WeightRows] | None = getattr(self._last, "made", None)
        if made is not None and made[0] == key:
            return made[1]
        self._last.made = made = None  # free the old rows before new ones are allocated
        generator = np.random.Generator(np.random.SFC64([self._seed, *map(int, key)]))
        shape = sum(share.whole for share in row_shares(buffer, split)), column_share(buffer, split).whole
        if weight(buffer).norm:
            rows = vector(generator.random(shape[0], dtype=np.float32) + np.float32(0.5))
        else:
            rows = WeightRows(Dtype.BF16, _draw(generator, shape[0] * shape[1]).reshape(shape).view(np.uint8))
        if split.tp > 1:
            self._last.made = key, rows
        return rows


def _draw(generator: np.random.Generator, count: int) -> NDArray[np.uint16]:
    out = np.empty(count, dtype=np.uint16)
    for start in range(0, count, 4 * _CHUNK):
        part = out[start : start + 4 * _CHUNK]
        # For all 64 bits, `integers` returns the same words as `random_raw`, but it releases Python's GIL.
        words = generator.integers(_ALL, size=-(-len(part) // 4), dtype=np.uint64, endpoint=True)
        words &= _KEEP
        words |= _SET
        part[:] = words.astype("<u8", copy=False).view("<u2")[: len(part)]
    return out
