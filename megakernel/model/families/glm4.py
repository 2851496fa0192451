"""GLM-4-0414: GLM-4 with norms of what a layer adds to the residual, besides those of its inputs."""

from __future__ import annotations

from dataclasses import replace

from ...isa import Buffer, Forward
from ..config import ModelConfig
from .family import of_layer
from .like_llama import GLM
from .llama import AFTER, BEFORE
from .verbs import add_norm, attention, matmul, norm, qkv, silu_matmul

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """Norms follow the matmuls whose results a layer adds to the residual."""
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            qkv("qkv_rope", inputs=B.H, weights=B.W_QKV, bias=c.bias(B.B_QKV), output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            matmul("o_proj", inputs=B.ATTN, weights=B.W_O, output=B.SUBLAYER),
            add_norm("post_attn_norm", inputs=B.SUBLAYER, scale=B.POST_ATTN_NORM, output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            silu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, output=B.ACT),
            matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, output=B.SUBLAYER),
            add_norm("post_mlp_norm", inputs=B.SUBLAYER, scale=B.POST_MLP_NORM, output=B.X),
        ],
        AFTER,
    )


GLM4 = replace(
    GLM,
    name="glm4",
    architecture="Glm4ForCausalLM",
    gguf=("glm4",),
    models="GLM-4-9B-0414, GLM-4-32B-0414",
    forward=forward,
    weights={
        **GLM.weights,
        B.POST_ATTN_NORM: of_layer("post_self_attn_layernorm", "post_attention_norm"),
        B.POST_MLP_NORM: of_layer("post_mlp_layernorm", "post_ffw_norm"),
    },
    fixed={"post_norms": True},
)
