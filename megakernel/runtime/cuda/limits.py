"""Checks whether the Hopper interpreter can execute a program."""

from __future__ import annotations

from ...isa import KV_BLOCK, Dims, Dtype, Phase, Units
from ...isa.record import Records
from .pages import CHUNK, PIECES, norm_fits
from .params import PAGES

_TURN = 32  # a warp processes this many columns of its accumulators at a time (csrc/cuda/gemm.h)


def refusal(dims: Dims) -> str | None:
    """The reason why programs of these sizes cannot run on a GPU, in a few words, or None if they can."""
    if dims.dtype != Dtype.BF16:
        return f"it computes in bf16, not in {Dtype(dims.dtype).name.lower()}: use --dtype bf16"
    if dims.quantised_kv:
        return "K and V are quantised, but the interpreter takes them in bf16: use --kv-cache-dtype auto"
    if dims.head_dim > 128 or dims.head_dim % 8:
        return f"heads have {dims.head_dim} elements, but the interpreter takes multiples of 8 up to 128"
    for name in ("hidden", "ffn"):
        if (size := getattr(dims, name)) % 8:
            return f"{name} is {size}, but the interpreter takes multiples of 8"
    if dims.ring_pages != PAGES:
        return "the program was not compiled for a GPU's shared memory: compile it for an h100 or h200"
    if not dims.kv_page == dims.kv_block == KV_BLOCK:
        return f"the program has KV pages of {dims.kv_page} tokens, not {KV_BLOCK}: compile it for an h100 or h200"
    return None


def phase_refusal(phase: Phase, records: Records, dims: Dims) -> str | None:
    """The reason why records of a phase cannot run on a GPU, in a few words, or None if they can."""
    if phase.weight_bits is not None:
        return f"has weights of {phase.weight_bits:g} bits, which the interpreter does not read"
    if phase.norm is not None:
        rows, inner = int(phase.columns(records)["rows"].max()), phase.inner(dims)
        if not norm_fits(rows, inner, dims):
            return f"normalises {rows} rows of {inner} elements itself, which its units and shared memory do not allow"
    if phase.head_norm is not None:
        dots, unit = dims.units == Units.DOTS, 2 * PIECES
        if dims.head_dim % unit if dots else dims.head_dim % _TURN or CHUNK % dims.head_dim:
            sizes = f"multiples of {unit}" if dots else f"multiples of {_TURN} that divide {CHUNK}"
            return f"normalises heads of {dims.head_dim} elements, but its units take {sizes}"
    return None
