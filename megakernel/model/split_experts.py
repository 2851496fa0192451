"""Reads experts from safetensors files in which one tensor has gate and up of all experts of a layer.

In gpt-oss, outputs of gate and up alternate, and there are biases. In Qwen3-VL, outputs of gate come first. A tensor
of floats has the axes [expert, input, output]. An MXFP4 matrix consists of two byte tensors. `_blocks` [expert, output,
block, 16] has 16 bytes for 32 inputs, and `_scales` [expert, output, block] has one exponent per block.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dtype
from ..isa.dtypes import BLOCKS
from .file_checkpoint import TensorFile

_BLOCK = BLOCKS[Dtype.MXFP4].weights


class _Part(NamedTuple):
    """Every `step`-th output of one expert, from number `first` on. `kind` is the end of the tensor's name."""

    stored: str
    kind: str
    expert: int
    first: int
    step: int


def split_experts(files: TensorFile, alternate: bool) -> TensorFile:
    """If a tensor of `files` has gate and up of all experts, return a view in which gate and up of each expert are
    separate tensors. If `alternate`, the outputs of gate and up alternate in the files."""
    return _Split(files, alternate) if any(".experts.gate_up_proj" in name for name in files.shapes) else files


class _Split:
    def __init__(self, files: TensorFile, alternate: bool) -> None:
        self._files = files
        self._parts: dict[str, _Part] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in files.shapes.items():
            stem, _, matrix = name.rpartition(".experts.")
            proj, _, kind = matrix.partition("_proj")
            axes = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}.get(kind)
            if not stem or proj not in ("gate_up", "down") or axes is None:
                self.shapes[name] = shape
                continue
            scales = name.removesuffix("_blocks") + "_scales"
            good = len(shape) == axes
            if kind == "_blocks":
                good &= (*files.shapes.get(scales, ()), _BLOCK // 2) == shape
                good &= all(files.rows(each, 0, 0).dtype == np.uint8 for each in (name, scales) if good)
            if not good:
                raise MegakernelError(
                    f"tensor {name} in {files.where(name)} does not have the type and shape of experts' weights"
                )
            inputs = {"": shape[1:2], "_blocks": (_BLOCK * shape[-2],)}.get(kind, ())
            parts = [] if kind == "_scales" else ["gate", "up"] if proj == "gate_up" else ["down"]
            count = (shape[2] if kind == "" else shape[1]) // max(len(parts), 1)
            for expert, (number, part) in product(range(shape[0]), enumerate(parts)):
                own = f"{stem}.experts.{expert}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"
                self.shapes[own] = (count, *inputs)
                places = (number, len(parts)) if alternate else (number * count, 1)
                self._parts[own] = _Part(name, kind, expert, *places)

    def where(self, name: str) -> Path:
        return self._files.where(self._parts[name].stored if name in self._parts else name)

    def dtype(self, name: str) -> Dtype:
        part = self._parts.get(name)
        if part is not None and part.kind == "_blocks":
            return Dtype.MXFP4
        return self._files.dtype(part.stored if part else name)

    def rows(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        if name not in self._parts:
            return self._files.rows(name, start, end)
        stored, kind, expert, first, step = self._parts[name]
        own, shape = slice(first + step * start, first + step * end, step), self._files.shapes[stored]
        if kind != "_blocks":
            inputs = shape[1] if kind == "" else 1
            return np.ascontiguousarray(self._files.rows(stored, expert * inputs, (expert + 1) * inputs)[:, own].T)
        # Return MXFP4 blocks with their values in GGML's order.
        first, end = (expert * shape[1] + own.start) * shape[2], (expert * shape[1] + own.stop) * shape[2]
        codes = self._files.rows(stored, first, end).view(np.uint8)
        scales = self._files.rows(stored.removesuffix("_blocks") + "_scales", first // shape[2], end // shape[2])
        pairs = codes.reshape(-1, shape[2], _BLOCK // 2)[::step]
        values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], _BLOCK)
        # A byte of a file has two successive values. In GGML, byte i has the values i and i + 16.
        packed = values[..., : _BLOCK // 2] | values[..., _BLOCK // 2 :] << 4
        blocks = np.concatenate([scales.view(np.uint8)[::step, :, None], packed], axis=-1)
        return blocks.reshape(len(blocks), -1)
