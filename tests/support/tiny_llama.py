"""Small random Llamas, as a transformers model and as a Checkpoint of the same weights.

Initialised so strongly that a mistake shows: attention is sharp, norms and biases are far from their neutral values,
every layer moves the residual by its own size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from megakernel.isa import Buffer, Dtype, from_f32
from megakernel.model.config import LlamaConfig, Rope, RopeKind

SHAPE = {
    "vocab": 101,
    "hidden": 48,
    "ffn": 72,
    "layers": 2,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 16,
    "max_context": 512,
    "rms_eps": 1e-5,
    "tied": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope": Rope(),
}
ROPES = {
    "default": Rope(theta=10000.0),
    "linear": Rope(theta=10000.0, kind=RopeKind.LINEAR, factor=4.0),
    "llama3": Rope(500000.0, RopeKind.LLAMA3, 8.0, 1.0, 4.0, original_context=64),
}


class TinyCheckpoint:
    """Checkpoint over the state dict of a transformers Llama."""

    dtype = Dtype.F32

    def __init__(self, model: LlamaForCausalLM, config: LlamaConfig) -> None:
        self.name = "tiny"
        self.config = config
        self._state = {k: v.detach().numpy().astype(np.float32) for k, v in model.state_dict().items()}
        self._inv_freq = model.model.rotary_emb.inv_freq.numpy().astype(np.float32)

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        c = self.config
        s = self._state
        at = f"model.layers.{layer}."

        def bias(name: str, size: int) -> NDArray[np.float32]:
            return s.get(at + name, np.zeros(size, np.float32))

        match buffer:
            case Buffer.EMBED:
                return from_f32(s["model.embed_tokens.weight"], dtype)
            case Buffer.INV_FREQ:
                return self._inv_freq
            case Buffer.ATTN_NORM:
                return s[at + "input_layernorm.weight"]
            case Buffer.W_QKV:
                q, k, v = (s[f"{at}self_attn.{n}_proj.weight"] for n in "qkv")
                return from_f32(np.concatenate([self._interleave(q), self._interleave(k), v]), dtype)
            case Buffer.B_QKV:
                q = bias("self_attn.q_proj.bias", c.heads * c.head_dim)
                k, v = (bias(f"self_attn.{n}_proj.bias", c.kv_heads * c.head_dim) for n in "kv")
                return np.concatenate([self._interleave(q), self._interleave(k), v])
            case Buffer.W_O:
                return from_f32(s[at + "self_attn.o_proj.weight"], dtype)
            case Buffer.B_O:
                return bias("self_attn.o_proj.bias", c.hidden)
            case Buffer.MLP_NORM:
                return s[at + "post_attention_layernorm.weight"]
            case Buffer.W_GATE_UP:
                return from_f32(np.stack([s[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")]), dtype)
            case Buffer.B_GATE_UP:
                return np.stack([bias(f"mlp.{n}_proj.bias", c.ffn) for n in ("gate", "up")])
            case Buffer.W_DOWN:
                return from_f32(s[at + "mlp.down_proj.weight"], dtype)
            case Buffer.B_DOWN:
                return bias("mlp.down_proj.bias", c.hidden)
            case Buffer.FINAL_NORM:
                return s["model.norm.weight"]
            case Buffer.LM_HEAD:
                return from_f32(s["model.embed_tokens.weight" if c.tied else "lm_head.weight"], dtype)
        raise AssertionError(f"{buffer.name} is no weight")

    def _interleave(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Put row i + head_dim/2 of each head next to row i."""
        d = self.config.head_dim
        return rows.reshape(-1, 2, d // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def make_llama(seed: int, **shape: Any) -> tuple[LlamaForCausalLM, TinyCheckpoint]:
    """A float32 model with keys of SHAPE overridden by `shape`, and its Checkpoint."""
    unknown = set(shape) - set(SHAPE)
    if unknown:
        raise TypeError(f"unknown shape keys {unknown}")
    config = LlamaConfig(**{**SHAPE, **shape})
    hf = LlamaForCausalLM(_hf_config(config)).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(torch.sign(noise) * (0.5 + torch.rand(p.shape, generator=generator)))
            elif name.endswith("bias"):
                p.copy_(0.5 * noise)
            elif "embed" in name:
                p.copy_(noise)
            else:
                # q and k: scores of standard deviation 2, so that a few tokens get most of the attention.
                gain = 2**0.5 if "q_proj" in name or "k_proj" in name else 1.0
                p.copy_(gain * noise / p.shape[1] ** 0.5)
    return hf, TinyCheckpoint(hf, config)


def _hf_config(c: LlamaConfig) -> HfConfig:
    rope: dict[str, Any] = {"rope_type": c.rope.kind.value, "rope_theta": c.rope.theta}
    if c.rope.kind is not RopeKind.DEFAULT:
        rope["factor"] = c.rope.factor
    if c.rope.kind is RopeKind.LLAMA3:
        rope["low_freq_factor"] = c.rope.low_freq_factor
        rope["high_freq_factor"] = c.rope.high_freq_factor
        rope["original_max_position_embeddings"] = c.rope.original_context
    # transformers 5 reads rope_parameters, 4 reads rope_theta and rope_scaling.
    return HfConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_context,
        rms_norm_eps=c.rms_eps,
        tie_word_embeddings=c.tied,
        attention_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        attn_implementation="eager",
        **_rope_arguments(c, rope),
    )


def _rope_arguments(c: LlamaConfig, rope: dict[str, Any]) -> dict[str, Any]:
    if hasattr(HfConfig(), "rope_parameters"):
        return {"rope_parameters": rope}
    scaling = None if c.rope.kind is RopeKind.DEFAULT else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {"rope_theta": c.rope.theta, "rope_scaling": scaling}


def hf_logits(hf: LlamaForCausalLM, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of all positions of one prompt, [len(tokens), vocab]."""
    with torch.no_grad():
        logits: NDArray[np.float32] = hf(torch.tensor([tokens])).logits[0].numpy()
    return logits


def error(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference in standard deviations of the expected logits."""
    return float(np.abs(got - expected).max() / expected.std())
