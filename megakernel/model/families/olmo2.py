"""OLMo 2 and 3. Their layers are those of Llama, but norms follow attention and the MLP instead of preceding them, and
q and k have norms over all heads. OLMo 3 also has sliding windows, with an unscaled RoPE, in three of four layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...isa import Buffer, Forward, Operation, Phase, Result
from ..config import Keys, ModelConfig
from . import glm4, llama, qwen3
from .family import Family
from .verbs import heads_norm, raw_qkv, rounded
from .windows import every_nth, read_gguf_windows, windows_with_rope

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """Llama's phases with other norms. If the RoPE of layers differs, each layer ends with the next one's table."""

    def changed(p: Phase) -> list[Phase]:
        if p.operation is Operation.NORM and p.result is Result.NONE:
            return [rounded(p.name.replace("norm", "input"), inputs=B.X, output=B.H)]
        if p.result is Result.HEADS:
            return [
                raw_qkv("qkv", inputs=B.H, weights=B.W_QKV, bias=p.bias, output=B.QKV),
                heads_norm("qk_norm_rope", inputs=B.QKV, scale=B.QK_NORM, output=B.Q),
            ]
        return [p]

    f = glm4.post_norms(llama.forward(c))
    ahead = [replace(f.prologue[1], name="next_rope", ahead=1)] if c.local_theta else []
    return Forward.of(f.prologue, [*(part for phase in f.body for part in changed(phase)), *ahead], f.epilogue)


_NORMS = {"post_norms": True, "whole_norms": True}


def read(config: Keys) -> dict[str, Any]:
    """Read `attention_bias`, which adds a bias to all attention projections."""
    attention = config.flag("attention_bias")
    return {"qkv_bias": attention, "o_bias": attention} | _NORMS


def read3(config: Keys) -> dict[str, Any]:
    """Read also which layers have windows, and their RoPE base."""
    full, theta = every_nth(config.count("num_hidden_layers"), 4), config.number("rope_theta", 5e5)
    return read(config) | windows_with_rope(config, full, theta)


def read_gguf(config: Keys) -> dict[str, Any]:
    """Read the windows, which only files of OLMo 3 have, and their RoPE base."""
    return _NORMS | read_gguf_windows(config, 4, config.number("rope.freq_base", 1e4))


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    ("olmo2",),
    forward,
    qwen3.WEIGHTS
    | {
        B.POST_ATTN_NORM: glm4.norm("post_attention_layernorm", "post_attention_norm"),
        B.POST_MLP_NORM: glm4.norm("post_feedforward_layernorm", "post_ffw_norm"),
    },
    read,
    frozenset({"attention_bias"}),
    interleaved=False,
    defaults={"rms_norm_eps": 1e-5},
    read_gguf=read_gguf,
    gguf_keys=frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    read=read3,
    keys=OLMO2.keys | {"layer_types", "sliding_window"},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    two_ropes=True,
)
