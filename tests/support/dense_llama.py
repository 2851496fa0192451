"""Llama and its relatives as plain mathematics: the logits of one sequence, in float64, with a checkpoint's weights.
Nothing here knows of tiles, ranks, KV caches or the phases of a program."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from weights import loaded

from megakernel.isa import Buffer as B
from megakernel.model.checkpoint import Checkpoint
from megakernel.model.families import weights

Array = NDArray[np.float64]


def dense_logits(checkpoint: Checkpoint, tokens: Sequence[int]) -> Array:
    """Return the logits at all positions of a prompt, with the shape [len(tokens), vocab]."""
    c, has = checkpoint.config, weights(checkpoint.config)

    def load(buffer: B, layer: int) -> Array:
        return loaded(checkpoint, buffer, layer).astype(np.float64)

    def matmul(rows: Array, weight: B, bias: B, layer: int) -> Array:
        """Return rows W^T + b for each matrix of a buffer: [rows, columns], or [matrices, rows, columns]."""
        product = rows @ np.swapaxes(load(weight, layer), -1, -2)
        return product + load(bias, layer)[..., None, :] if bias in has else product

    def norm(rows: Array, scale: Array) -> Array:
        return rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + c.rms_eps) * scale

    # Columns 2i and 2i + 1 of a head are the real and the imaginary part of a number that RoPE rotates.
    frequencies, factors = load(B.INV_FREQ, 0)
    turns = factors * np.exp(1j * np.outer(np.arange(len(tokens)), frequencies))[:, None]

    def rotate(heads: Array) -> Array:
        return ((heads[..., ::2] + 1j * heads[..., 1::2]) * turns).view(np.float64)

    def attention(q: Array, k: Array, v: Array) -> Array:
        """Return causal attention. q is [rows, heads, head_dim]; k and v have fewer heads, which heads of q share."""
        k, v = (np.repeat(each, c.heads // c.kv_heads, axis=1) for each in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hij,jhd->ihd", shares / shares.sum(axis=-1, keepdims=True), v).reshape(len(q), -1)

    x = load(B.EMBED, 0)[tokens]
    for layer in range(c.layers):
        qkv = matmul(norm(x, load(B.ATTN_NORM, layer)), B.W_QKV, B.B_QKV, layer).reshape(len(x), -1, c.head_dim)
        q, k, v = np.split(qkv, [c.heads, c.heads + c.kv_heads], axis=1)
        if B.QK_NORM in has:
            q, k = (norm(heads, scale) for heads, scale in zip((q, k), load(B.QK_NORM, layer), strict=True))
        x = x + matmul(attention(rotate(q), rotate(k), v), B.W_O, B.B_O, layer)
        gate, up = matmul(norm(x, load(B.MLP_NORM, layer)), B.W_GATE_UP, B.B_GATE_UP, layer)
        x = x + matmul(gate / (1 + np.exp(-gate)) * up, B.W_DOWN, B.B_DOWN, layer)
    return norm(x, load(B.FINAL_NORM, 0)) @ load(B.LM_HEAD, 0).T
