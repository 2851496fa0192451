"""Reads experts from safetensors files in which one tensor has the gate and up matrices of all experts.

In gpt-oss, outputs of gate and up alternate, and there are biases. In Qwen3-VL, outputs of gate come first. A tensor
of floats has the axes [expert, input, output]. An MXFP4 matrix consists of two byte tensors. `_blocks` [expert, output,
block, 16] has 16 bytes for 32 inputs, and `_scales` [expert, output, block] has one exponent per block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dtype
from ..isa.dtypes import BLOCKS
from .file_checkpoint import Tensor, Tensors

_BLOCK = BLOCKS[Dtype.MXFP4].weights


def split_experts(tensors: Tensors, alternate: bool) -> Tensors:
    """Replace each tensor that has matrices of all experts by one tensor for each matrix of each expert. If
    `alternate`, the outputs of gate and up alternate in the files."""
    out = Tensors()
    for name, tensor in tensors.items():
        (stem, _, matrix), shape = name.rpartition(".experts."), tensor.shape
        proj, _, kind = matrix.partition("_proj")
        axes = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}.get(kind)
        if not stem or proj not in ("gate_up", "down") or axes is None:
            out[name] = tensor
            continue
        scales = tensors.get(name.removesuffix("_blocks") + "_scales")
        good = len(shape) == axes
        if kind == "_blocks":
            good &= scales is not None and scales.dtype is tensor.dtype is None
            good &= scales is not None and (*scales.shape, _BLOCK // 2) == shape
        if not good:
            raise MegakernelError(
                f"tensor {name} in {tensor.path} does not have the type and shape of experts' weights"
            )
        inputs = {"": shape[1:2], "_blocks": (_BLOCK * shape[-2],)}.get(kind, ())
        parts = [] if kind == "_scales" else ["gate", "up"] if proj == "gate_up" else ["down"]
        count = (shape[2] if kind == "" else shape[1]) // max(len(parts), 1)
        for expert, (number, part) in product(range(shape[0]), enumerate(parts)):
            # The expert's tensor has every `step`-th output, from number `first` on.
            first, step = (number, len(parts)) if alternate else (number * count, 1)
            rows, dtype = partial(_floats, tensor, expert, first, step), tensor.dtype
            if kind == "_blocks" and scales is not None:
                rows, dtype = partial(_blocks, tensor, scales, expert, first, step), Dtype.MXFP4
            own = f"{stem}.experts.{expert}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"
            out[own] = replace(tensor, shape=(count, *inputs), dtype=dtype, rows=rows)
    return out


def _floats(whole: Tensor, expert: int, first: int, step: int, start: int, end: int) -> NDArray[np.generic]:
    inputs = whole.shape[1] if len(whole.shape) == 3 else 1
    rows = whole.rows(expert * inputs, (expert + 1) * inputs)
    return np.ascontiguousarray(rows[:, first + step * start : first + step * end : step].T)


def _blocks(
    whole: Tensor, scales: Tensor, expert: int, first: int, step: int, start: int, end: int
) -> NDArray[np.generic]:
    """Return MXFP4 blocks with their values in GGML's order."""
    _, outputs, blocks, _ = whole.shape
    begin, stop = (expert * outputs + first + step * at for at in (start, end))
    pairs = whole.rows(begin * blocks, stop * blocks).view(np.uint8).reshape(-1, blocks, _BLOCK // 2)[::step]
    values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], _BLOCK)
    # A byte of a file has two successive values. In GGML, byte i has the values i and i + 16.
    packed = values[..., : _BLOCK // 2] | values[..., _BLOCK // 2 :] << 4
    exponents = scales.rows(begin, stop).view(np.uint8)[::step, :, None]
    return np.concatenate([exponents, packed], axis=-1).reshape(len(pairs), -1)
