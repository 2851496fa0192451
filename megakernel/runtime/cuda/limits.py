"""What the Hopper interpreter can execute."""

from __future__ import annotations

from ...isa import KV_BLOCK, Dims, Dtype
from ...isa.launch import PAGES


def refusal(dims: Dims) -> str | None:
    """Why no program of these sizes runs on a GPU, in a few words; None where one does."""
    if dims.dtype != Dtype.BF16:
        return f"it computes in bf16, not in {Dtype(dims.dtype).name.lower()}: use --dtype bf16"
    if dims.head_dim > 128 or dims.head_dim % 8:
        return f"heads have {dims.head_dim} elements, it takes multiples of 8 up to 128"
    for name in ("hidden", "ffn"):
        if (size := getattr(dims, name)) % 8:
            return f"{name} is {size}, it takes multiples of 8"
    if dims.pages != PAGES:
        return "the program was not compiled for its shared memory: compile it for an h100 or h200"
    if not dims.page == dims.kv_block == KV_BLOCK:
        return f"the program has KV pages of {dims.page} tokens, it takes {KV_BLOCK}: compile it for an h100 or h200"
    return None
