"""Llama: a step from token ids to sampled tokens, top to bottom, and the names of its weights in files."""

from __future__ import annotations

from typing import Any

from ...isa import Buffer, Dims, Forward, Operation, Phase, Result, Rows
from ..config import ModelConfig
from .family import Family, Norm, Reader, Weight

B = Buffer


def forward(c: ModelConfig, d: Dims, norm: Norm) -> Forward:
    """The phases of a step, divided among `d.tp` ranks as `d` says. `norm` says where a layer
    computes its norms.
    """
    tokens = Phase("embed", Operation.GATHER, Rows.OWN, B.EMBED, output=B.X)
    angles = Phase("rope", Operation.ROPE, Rows.EVERY, B.INV_FREQ, output=B.ROPE)
    into_heads = _normed_matmul(
        norm, "qkv_rope", B.W_QKV, B.ATTN_NORM, B.Q, Result.HEADS, B.B_QKV if c.qkv_bias else None
    )
    attention = Phase("attention", Operation.ATTENTION, inputs=B.Q, output=B.ATTN)
    out_of_heads = _project(
        d.tp == 1 or d.replicated_o, ("o_proj", "o_partial", "o_reduce"), B.W_O, B.ATTN, B.B_O if c.o_bias else None
    )
    gate_up = _normed_matmul(
        norm, "gate_up_silu", B.W_GATE_UP, B.MLP_NORM, B.ACT, Result.GATED, B.B_GATE_UP if c.mlp_bias else None
    )
    down = _project(
        d.tp == 1, ("down_proj", "down_partial", "down_reduce"), B.W_DOWN, B.ACT, B.B_DOWN if c.mlp_bias else None
    )
    final_norm = Phase("final_norm", Operation.NORM, Rows.LOGIT, B.FINAL_NORM, B.X, B.Y)
    lm_head = Phase("lm_head", Operation.MATMUL, Rows.LOGIT, B.LM_HEAD, B.Y, B.LOGITS, Result.LOGITS)
    sample = Phase("sample", Operation.SAMPLE, Rows.SAMPLED, inputs=B.LOGITS)

    first_norm = [_norm("first_norm", B.ATTN_NORM)] if norm is Norm.NEXT else []
    attn_norm = [_norm("attn_norm", B.ATTN_NORM)] if norm is Norm.OWN else []
    mlp_norm = [] if norm is Norm.INSIDE else [_norm("mlp_norm", B.MLP_NORM)]
    next_norm = [_norm("next_norm", B.ATTN_NORM, ahead=1)] if norm is Norm.NEXT else []
    return Forward.of(
        [tokens, angles, *first_norm],
        [*attn_norm, into_heads, attention, *out_of_heads, *mlp_norm, gate_up, *down, *next_norm],
        [final_norm, lm_head, sample],
    )


def _norm(name: str, scale: Buffer, ahead: int = 0) -> Phase:
    return Phase(name, Operation.NORM, Rows.OWN, scale, B.X, B.H, ahead=ahead)


def _normed_matmul(
    norm: Norm, name: str, weights: Buffer, scale: Buffer, output: Buffer, result: Result, bias: Buffer | None
) -> Phase:
    """A matmul whose inputs are normalised residual rows. Either an earlier phase has normalised
    them, or the matmul does so itself, as it loads them.
    """
    inside = norm is Norm.INSIDE
    inputs = B.X if inside else B.H
    return Phase(
        name, Operation.MATMUL, Rows.EVERY, weights, inputs, output, result, bias, norm=scale if inside else None
    )


def _project(
    whole: bool | int, names: tuple[str, str, str], weights: Buffer, inputs: Buffer, bias: Buffer | None
) -> list[Phase]:
    """A matmul whose result is added to the residual: directly if each rank has all the weights,
    otherwise after a sum over ranks.
    """
    at_once, partial, total = names
    if whole:
        return [Phase(at_once, Operation.MATMUL, Rows.OWN, weights, inputs, B.X, Result.RESIDUAL, bias)]
    return [
        Phase(partial, Operation.MATMUL, Rows.EVERY, weights, inputs, B.REDUCE, Result.PARTIAL),
        Phase(total, Operation.REDUCE, Rows.OWN, weights, B.REDUCE, B.X, bias=bias),
    ]


_HF, _GGUF = "model.layers.{}.", "blk.{}."
WEIGHTS: dict[Buffer, Weight] = {
    B.EMBED: Weight(("model.embed_tokens.weight",), ("token_embd.weight",)),
    B.ATTN_NORM: Weight((_HF + "input_layernorm.weight",), (_GGUF + "attn_norm.weight",)),
    B.W_QKV: Weight(
        tuple(f"{_HF}self_attn.{p}_proj.weight" for p in "qkv"), tuple(f"{_GGUF}attn_{p}.weight" for p in "qkv"), 2
    ),
    B.B_QKV: Weight(
        tuple(f"{_HF}self_attn.{p}_proj.bias" for p in "qkv"), tuple(f"{_GGUF}attn_{p}.bias" for p in "qkv"), 2
    ),
    B.W_O: Weight((_HF + "self_attn.o_proj.weight",), (_GGUF + "attn_output.weight",)),
    B.B_O: Weight((_HF + "self_attn.o_proj.bias",), (_GGUF + "attn_output.bias",)),
    B.MLP_NORM: Weight((_HF + "post_attention_layernorm.weight",), (_GGUF + "ffn_norm.weight",)),
    B.W_GATE_UP: Weight(
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), (_GGUF + "ffn_gate.weight", _GGUF + "ffn_up.weight")
    ),
    B.B_GATE_UP: Weight(
        (_HF + "mlp.gate_proj.bias", _HF + "mlp.up_proj.bias"), (_GGUF + "ffn_gate.bias", _GGUF + "ffn_up.bias")
    ),
    B.W_DOWN: Weight((_HF + "mlp.down_proj.weight",), (_GGUF + "ffn_down.weight",)),
    B.B_DOWN: Weight((_HF + "mlp.down_proj.bias",), (_GGUF + "ffn_down.bias",)),
    B.FINAL_NORM: Weight(("model.norm.weight",), ("output_norm.weight",)),
    B.LM_HEAD: Weight(("lm_head.weight",), ("output.weight",)),
}


def read(config: Reader) -> dict[str, Any]:
    """Read which matmuls have biases: `attention_bias` means those of attention, `mlp_bias` those of the MLP."""
    attention = config.flag("attention_bias")
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": config.flag("mlp_bias")}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    ("llama",),
    forward,
    WEIGHTS,
    read,
    frozenset({"attention_bias", "mlp_bias"}),
)
