"""A Llama in plain torch that reads the CUDA backend's own weights, for comparison and as a check.

Torch receives the weights as CuPy arrays through DLPack. It uses them without a copy in bf16, and widens them for
float32. The decode step is written for torch.compile: it has fixed shapes and a static KV cache in buffers, and is one
graph.

The model of `bench latency --vs torch`, which comes from transformers, cannot replace this model. The transformers
model rounds the residual to bf16 after attention and after the MLP, while the residual stays in float32 here and in our
backend. So the KL divergence of the transformers model from float32 is two to four times as large, and a test that took
it as the limit for our backend would tolerate too much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from megakernel.isa import BUFFERS, Buffer, Dims
from megakernel.model import ModelConfig
from megakernel.model.families import weights

_B = Buffer


def device_array(backend: Any, buffer: Buffer, layer: int, dims: Dims) -> Any:
    """Return one weight of a CUDA backend's rank `dims.rank` as a CuPy array. Nothing is copied."""
    import cupy

    spec = BUFFERS[buffer]
    shape, kind = spec.shape(dims, backend.pages), spec.resolve_dtype(dims.model).numpy
    address, gpu = backend._heap.address(dims.split.rank, buffer, layer), backend._node.gpu(dims.split.rank)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = cupy.cuda.UnownedMemory(address, size, backend, gpu.ordinal)
    return cupy.ndarray(shape, kind, cupy.cuda.MemoryPointer(memory, 0))


class TorchLlama(torch.nn.Module):
    """A Llama model for one sequence of up to `capacity` tokens, which computes in `dtype` (bfloat16 or float32).

    Its weights come from `device_array`, whose results torch accepts through DLPack. A bfloat16 weight arrives as
    16-bit integers.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor

    def __init__(self, backend: Any, config: ModelConfig, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dims: Dims = backend.dims.changed(tp=1, rank=0)
        self.dtype = dtype
        d = self.dims
        for buffer in weights(config):
            for layer in range(d.model.layers if BUFFERS[buffer].layered else 1):
                weight = torch.from_dlpack(device_array(backend, buffer, layer, d))
                bits = weight.dtype in (torch.uint16, torch.int16)
                weight = weight.view(torch.bfloat16).to(dtype) if bits else weight
                self.register_buffer(f"{buffer.name}_{layer}", weight)
        where = self._weight(_B.INV_FREQ).device
        positions = torch.arange(capacity, device=where, dtype=torch.float32)
        frequencies, factor = self._weight(_B.INV_FREQ)
        angle = positions[:, None] * frequencies
        self.register_buffer("cos", factor * angle.cos())
        self.register_buffer("sin", factor * angle.sin())
        shape = (d.model.layers, d.model.kv_heads, capacity, d.model.head_dim)
        self.register_buffer("keys", torch.zeros(shape, device=where, dtype=dtype))
        self.register_buffer("values", torch.zeros(shape, device=where, dtype=dtype))
        self.register_buffer("places", torch.arange(capacity, device=where))

    def _weight(self, buffer: Buffer, layer: int = 0) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, f"{buffer.name}_{layer}")
        return weight

    def _biased(self, x: torch.Tensor, buffer: Buffer, layer: int) -> torch.Tensor:
        """Return `x` plus the bias in `buffer`, in the type of `x`; or `x` itself if the model has no such bias."""
        return x + self._weight(buffer, layer).to(x.dtype) if hasattr(self, f"{buffer.name}_{layer}") else x

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits of every token. `tokens` and `positions` have shape [n].

        The keys and values of earlier tokens are in the cache, and this call adds those of `tokens`.
        """
        d = self.dims
        x = functional.embedding(tokens, self._weight(_B.EMBED)).float()
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        mask = self.places[None, :] <= positions[:, None]
        for layer in range(d.model.layers):
            h = self._norm(x, _B.ATTN_NORM, layer)
            qkv = self._biased(functional.linear(h, self._weight(_B.W_QKV, layer)), _B.B_QKV, layer)
            q, k, v = qkv.split((d.split.q_cols, d.split.kv_cols, d.split.kv_cols), dim=-1)
            q = self._rotate(q.view(-1, d.model.heads, d.model.head_dim), cos, sin)
            k = self._rotate(k.view(-1, d.model.kv_heads, d.model.head_dim), cos, sin)
            self.keys[layer, :, positions] = k.transpose(0, 1)
            self.values[layer, :, positions] = v.view(-1, d.model.kv_heads, d.model.head_dim).transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                self.keys[layer][None],
                self.values[layer][None],
                attn_mask=mask,
                enable_gqa=d.model.heads != d.model.kv_heads,
            )
            heads = attended[0].transpose(0, 1).reshape(-1, d.split.q_cols)
            x = x + self._biased(functional.linear(heads, self._weight(_B.W_O, layer)).float(), _B.B_O, layer)
            h = self._norm(x, _B.MLP_NORM, layer)
            both = torch.stack([functional.linear(h, w) for w in self._weight(_B.W_GATE_UP, layer)], dim=1)
            gate, up = self._biased(both, _B.B_GATE_UP, layer).unbind(1)
            down = functional.linear(functional.silu(gate) * up, self._weight(_B.W_DOWN, layer))
            x = x + self._biased(down.float(), _B.B_DOWN, layer)
        return functional.linear(self._norm(x, _B.FINAL_NORM, 0), self._weight(_B.LM_HEAD)).float()

    def _norm(self, x: torch.Tensor, buffer: Buffer, layer: int) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.dims.model.rms_eps)
        return (x * scale * self._weight(buffer, layer)).to(self.dtype)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """RoPE pairs are adjacent."""
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(self.dtype)
