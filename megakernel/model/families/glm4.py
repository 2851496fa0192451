"""GLM-4-0414: GLM-4 with norms of what a layer adds to the residual, besides those of its inputs."""

from __future__ import annotations

from dataclasses import replace

from ...isa import Buffer, Forward, Operation, Phase, Result
from ..config import ModelConfig
from . import glm, llama
from .family import Family, Weight
from .verbs import add_norm

B = Buffer


def post_norms(f: Forward) -> Forward:
    """Let norms follow the matmuls whose results a layer adds to the residual."""

    def split(phase: Phase) -> list[Phase]:
        if phase.result is not Result.RESIDUAL or phase.operation is not Operation.MATMUL:
            return [phase]
        name, scale = ("attn", B.POST_ATTN_NORM) if phase.inputs is B.ATTN else ("mlp", B.POST_MLP_NORM)
        return [
            replace(phase, result=Result.STORED, output=B.SUBLAYER),
            add_norm(f"post_{name}_norm", inputs=B.SUBLAYER, scale=scale, output=B.X),
        ]

    return Forward.of(f.prologue, [part for phase in f.body for part in split(phase)], f.epilogue)


def forward(c: ModelConfig) -> Forward:
    """Llama's phases, and two norms more in each layer."""
    return post_norms(llama.forward(c))


def norm(safetensors: str, gguf: str) -> Weight:
    """The names of the scales of a layer's norm."""
    return Weight((f"model.layers.{{}}.{safetensors}.weight",), (f"blk.{{}}.{gguf}.weight",))


GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    ("glm4",),
    forward,
    {
        **glm.GLM.weights,
        B.POST_ATTN_NORM: norm("post_self_attn_layernorm", "post_attention_norm"),
        B.POST_MLP_NORM: norm("post_mlp_layernorm", "post_ffw_norm"),
    },
    lambda config: glm.read(config) | {"post_norms": True},
    glm.GLM.keys,
    defaults=glm.GLM.defaults,
    read_gguf=lambda config: {"post_norms": True},
)
