"""Checks whether the Hopper interpreter can execute a program."""

from __future__ import annotations

from ...isa import KV_BLOCK, Dims, Dtype, ModelSizes, Operation, Phase, Units
from ...targets.launch import PAGES
from ...targets.pages import CHUNK, HEAD_PART, PIECES, ROW_PAGES, dot_rows

_TURN = 32  # a warp processes this many columns of its accumulators at a time (csrc/cuda/gemm.h)


def wide(model: ModelSizes) -> bool:
    """Whether the model needs code that only builds with `Build.wide` have: for wide norms or heads, for capped scores
    or logits, or for norm scales that are applied after RoPE."""
    own = model.whole_norms or model.late_scales or model.score_cap or model.logit_cap
    return model.head_dim > HEAD_PART or bool(own)


def model_refusal(model: ModelSizes) -> str | None:
    """The reason why a model of these sizes cannot run on a GPU, in a few words, or None if it can."""
    if model.dtype != Dtype.BF16:
        return f"it computes in bf16, not in {Dtype(model.dtype).name.lower()}: use --dtype bf16"
    if model.quantised_kv:
        return "K and V are quantised, but the interpreter takes them in bf16: use --kv-cache-dtype auto"
    if model.q8_activations:
        return "activations are rounded to integers, but the interpreter takes them in bf16: use --activations float"
    if (model.head_dim > HEAD_PART or model.head_dim % 8) and model.head_dim != 2 * HEAD_PART:
        what = f"multiples of 8 up to {HEAD_PART}, and {2 * HEAD_PART}"
        return f"heads have {model.head_dim} elements, but the interpreter takes {what}"
    if model.experts and wide(model):
        return "it has experts, with heads or norms that the interpreter does not compute beside experts"
    for name in ("hidden", "ffn"):
        if (size := getattr(model, name)) % 8:
            return f"{name} is {size}, but the interpreter takes multiples of 8"
    return None


def refusal(dims: Dims) -> str | None:
    """The reason why programs of these sizes cannot run on a GPU, in a few words, or None if they can."""
    if reason := model_refusal(dims.model):
        return reason
    if dims.worker.ring_pages not in (PAGES, ROW_PAGES):
        return "the program was not compiled for a GPU's shared memory: compile it for an h100 or h200"
    if not dims.bucket.kv_page == dims.bucket.kv_block == KV_BLOCK:
        return (
            f"the program has KV pages of {dims.bucket.kv_page} tokens, not {KV_BLOCK}: compile it for an h100 or h200"
        )
    return None


def phase_refusal(phase: Phase, dims: Dims) -> str | None:
    """The reason why a phase cannot run on a GPU, in a few words, or None if it can."""
    if phase.weight_bits is not None:
        return f"has weights of {phase.weight_bits:g} bits, which the interpreter does not read"
    if phase.operation is Operation.ATTENTION and phase.weights is not None and not dims.model.experts:
        return "has attention sinks, which the interpreter adds only in models with experts"
    if phase.operation is Operation.NORM and phase.weights is None and not wide(dims.model):
        return "rounds rows without a norm, which the interpreter does only in models with norms over all heads"
    if phase.operation is Operation.EXPERTS and not dot_rows(phase.inner(dims.split)):
        return f"has rows of {phase.inner(dims.split)} elements, which shared memory cannot hold"
    if phase.head_norm is not None:
        dots, unit = dims.worker.units == Units.DOTS, 2 * PIECES
        if dims.model.head_dim % unit if dots else dims.model.head_dim % _TURN or CHUNK % dims.model.head_dim:
            sizes = f"multiples of {unit}" if dots else f"multiples of {_TURN} that divide {CHUNK}"
            return f"normalises heads of {dims.model.head_dim} elements, but its units take {sizes}"
    return None
