"""Reads weights from files of any format, and declares which tensors form each buffer."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError, file_errors, regular
from ..isa import BUFFERS, Buffer, Dtype, Split, all_finite
from .checkpoint import (
    CHUNK,
    Checkpoint,
    Share,
    Storage,
    StoredRows,
    WeightRows,
    array_of,
    column_share,
    cut_columns,
    floats,
    row_shares,
    vector,
)
from .config import ModelConfig
from .families import forward, weights
from .rope import rope_table


class TensorFile(Protocol):
    """A file, or several, with named tensors. A row is the part of a tensor at one index of all axes but the last."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def where(self, name: str) -> Path:
        """The file that contains `name`."""

    def dtype(self, name: str) -> Dtype:
        """The type of the elements that `rows` returns."""

    def rows(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        """Rows [start, end) as a 2-D array. A vector is one column, bfloat16 is uint16, quantised blocks are bytes."""


@dataclass(frozen=True)
class Naming:
    """The names of the tensors of each buffer in a file format, in the order of the buffer's rows. `{}` is the layer. A
    name that is repeated is one tensor with the rows of several matrices. If layers have `experts`, the names are those
    of one expert: `{expert}` is its number, and a name without it is a tensor [experts, rows, columns] of all experts.

    `halved` says how many of a buffer's tensors, counted from the first, have the rows of a RoPE pair half a head
    apart. In all other tensors these rows are adjacent. With `biases_optional`, a bias that is absent counts as zero.
    Tensors whose names end with one of `ignored` are not read, because they only repeat what the config says. The
    values of `plus_one`, which are vectors, are 1 less than the weights.
    """

    parts: Mapping[Buffer, tuple[str, ...]]
    halved: Mapping[Buffer, int]
    biases_optional: bool
    ignored: tuple[str, ...] = ()
    experts: int = 0
    plus_one: frozenset[Buffer] = frozenset()

    def names(self, buffer: Buffer, layer: int) -> list[str]:
        experts = range(self.experts if self.experts and BUFFERS[buffer].per_expert else 1)
        return [part.format(layer, expert=expert) for expert in experts for part in self.parts[buffer]]

    def stacked(self, buffer: Buffer) -> bool:
        """Whether all experts of a layer are in one tensor."""
        return bool(self.experts) and BUFFERS[buffer].per_expert and "{expert}" not in self.parts[buffer][0]


class FileCheckpoint:
    """A Checkpoint that reads from a TensorFile. The constructor checks every name and shape, but reads no weights.

    `widened` has the bytes that the file has in each type that no backend computes with, by the type's name.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tensors: TensorFile,
        naming: Naming,
        widened: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.widened = widened or {}
        self.config = config
        self._tensors = tensors
        self._naming = naming
        _check(config, tensors, naming)
        matrices = {buffer: self._layout(buffer) for buffer in _expected_buffers(config) if BUFFERS[buffer].matrix}
        kinds = {buffer: {part.dtype for parts in s.layers for part in parts} for buffer, s in matrices.items()}
        self.dtype = Dtype.F32 if set().union(*kinds.values()) == {Dtype.F32} else Dtype.BF16
        self.storage = {buffer: s for buffer, s in matrices.items() if kinds[buffer] - {Dtype.F32, Dtype.BF16}}
        if kinds.get(Buffer.W_ROUTER) == {Dtype.F32}:  # rounding a router could change the choice of experts
            self.storage[Buffer.W_ROUTER] = matrices[Buffer.W_ROUTER]
        if config.tied and Buffer.EMBED in self.storage:
            self.storage[Buffer.LM_HEAD] = self.storage[Buffer.EMBED]

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        if buffer is Buffer.INV_FREQ:
            return [vector(rope_table(self.config, layer))]
        source = Buffer.EMBED if buffer is Buffer.LM_HEAD and self.config.tied else buffer
        wanted = None if buffer in self.storage else BUFFERS[buffer].resolve_dtype(split.model)
        out, begin = [], Counter[str]()  # the rows of a tensor that earlier parts of the buffer have taken
        names = self._naming.names(source, layer)
        for index, (name, share) in enumerate(zip(names, row_shares(buffer, split), strict=True)):
            if name in self._tensors.shapes:
                part = self._read(name, share._replace(first=begin[name] + share.first), buffer, split, wanted)
            else:  # the bias is absent, which _check has accepted
                part = vector(np.zeros(share.size, np.float32))
            if buffer in self._naming.plus_one:
                part = vector(part.data.view(np.float32) + np.float32(1))
            if buffer is Buffer.FINAL_NORM:
                part = vector(part.data.view(np.float32) / np.float32(self.config.logits_scaling))
            begin[name] += share.whole
            halved = index < self._naming.halved.get(buffer, 0)
            out.append(WeightRows(part.dtype, _interleave(part.data, self.config)) if halved else part)
        return out

    def _layout(self, buffer: Buffer) -> Storage:
        """The type and the number of rows of each tensor that the buffer consists of."""
        shares = row_shares(buffer, Split(self.config.sizes(Dtype.F32)))
        layers = range(self.config.layers if BUFFERS[buffer].layered else 1)
        parts = (zip(self._naming.names(buffer, layer), shares, strict=True) for layer in layers)
        return Storage(tuple(tuple(StoredRows(self._tensors.dtype(n), s.whole) for n, s in layer) for layer in parts))

    def _read(self, name: str, share: Share, buffer: Buffer, split: Split, dtype: Dtype | None) -> WeightRows:
        """A rank's part of a tensor in the float type `dtype`, or as a view of the file if this is the tensor's type or
        None. NaN and infinity are refused: one such weight would make every token meaningless, and a later error could
        not name the weight.
        """
        kind, end = self._tensors.dtype(name), share.first + share.size
        length = 1 if BUFFERS[buffer].matrix else math.prod(self._tensors.shapes[name][1:])

        def part(start: int, stop: int) -> WeightRows:
            # A row of a tensor of vectors, such as the biases of experts, has several elements.
            rows = self._tensors.rows(name, start // length, -(-stop // length))
            if length > 1:
                rows = rows.reshape(-1, 1)[start % length :][: stop - start]
            if not all_finite(rows, kind):
                raise MegakernelError(
                    f"tensor {name} in {self._tensors.where(name)} contains a NaN or an infinity: fetch the file again"
                )
            return cut_columns(WeightRows(kind, rows.view(np.uint8)), buffer, split)

        if dtype is None or dtype is kind:
            return part(share.first, end)
        column = column_share(buffer, split)
        step = max(1, CHUNK // column.whole)
        parts = (part(start, min(start + step, end)) for start in range(share.first, end, step))
        return WeightRows(dtype, floats(parts, (share.size, column.size), dtype).view(np.uint8))


def _interleave(rows: NDArray[Any], config: ModelConfig, *, back: bool = False) -> NDArray[Any]:
    """Turn rows in Hugging Face's order, in which the two rows of a RoPE pair are half of the rotated part of a head
    apart, into adjacent pairs, or `back`. The rows of a head that are not rotated stay where they are.
    """
    rotated = config.rope.dims or config.head_dim
    order = np.arange(config.head_dim)
    order[:rotated] = order[:rotated].reshape((-1, 2) if back else (2, -1)).T.ravel()
    return rows.reshape(-1, config.head_dim, rows.shape[1])[:, order].reshape(rows.shape)


def tensors_of(checkpoint: Checkpoint, naming: Naming, dtype: Dtype) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the tensors of `expected_shapes`, in order, as a file with this naming stores them: bfloat16 as uint16."""
    split = Split(checkpoint.config.sizes(dtype))
    shapes = expected_shapes(checkpoint.config, naming)
    for buffer in _expected_buffers(checkpoint.config):
        for layer in range(checkpoint.config.layers if BUFFERS[buffer].layered else 1):
            left = array_of(checkpoint, buffer, layer, split)
            if buffer is Buffer.FINAL_NORM:  # the inverse of `FileCheckpoint.rows`
                left = np.multiply(left, np.float32(checkpoint.config.logits_scaling))
            if buffer in naming.plus_one:
                left = np.subtract(left, np.float32(1))
            parts = defaultdict[str, list[NDArray[np.generic]]](list)
            for index, (name, share) in enumerate(
                zip(naming.names(buffer, layer), row_shares(buffer, split), strict=True)
            ):
                part, left = np.split(left, [share.whole])
                halved = index < naming.halved.get(buffer, 0)
                parts[name].append(_interleave(part, checkpoint.config, back=True) if halved else part)
            for name, own in parts.items():
                yield name, np.concatenate(own).reshape(shapes[name])


def expected_shapes(config: ModelConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a file must have."""
    expected: dict[str, tuple[int, ...]] = {}
    split = Split(config.sizes(Dtype.F32))
    for buffer in _expected_buffers(config):
        columns = (column_share(buffer, split).whole,) if BUFFERS[buffer].matrix else ()
        for layer in range(config.layers if BUFFERS[buffer].layered else 1):
            rows = Counter[str]()
            for name, share in zip(naming.names(buffer, layer), row_shares(buffer, split), strict=True):
                rows[name] += share.whole
            stack = split.model.stack if naming.stacked(buffer) else ()
            expected |= {name: (*stack, count // math.prod(stack), *columns) for name, count in rows.items()}
    return expected


def _expected_buffers(config: ModelConfig) -> list[Buffer]:
    without = {Buffer.INV_FREQ} | ({Buffer.LM_HEAD} if config.tied else set())
    return [b for b in weights(config) if b not in without]


def _check(config: ModelConfig, tensors: TensorFile, naming: Naming) -> None:
    """Check that the file has every tensor that the config requires, in the right shape, and no others."""
    expected = expected_shapes(config, naming)
    biases = [p.bias for p in forward(config) if p.bias is not None]
    optional = {
        name
        for buffer in (biases if naming.biases_optional else ())
        for layer in range(config.layers)
        for name in naming.names(buffer, layer)
    }
    if missing := [name for name in expected if name not in tensors.shapes and name not in optional]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        file = next(map(tensors.where, tensors.shapes), "the checkpoint")
        raise MegakernelError(f"{file} has no tensor {missing[0]}{more}, which the config asks for")
    for name, shape in expected.items():
        found = tensors.shapes.get(name, shape)
        if found != shape:
            raise MegakernelError(
                f"tensor {name} in {tensors.where(name)} has shape {list(found)}; the config asks for {list(shape)}"
            )
    for name in tensors.shapes:
        if name not in expected and not name.endswith(naming.ignored or ("\0",)):
            raise MegakernelError(
                f"tensor {name} in {tensors.where(name)} belongs to no part of the model that the config describes"
            )


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map a non-empty file into memory, and return its bytes as an array. The bytes are read on access."""
    try:
        with file_errors(f"read {path}"):
            return np.memmap(regular(path), dtype=np.uint8, mode="r").view(np.ndarray)
    except ValueError as e:
        raise MegakernelError(f"{path} is empty: fetch the file again") from e


def check_ranges(path: Path, ranges: list[tuple[int, int, str]], start: int, end: int) -> None:
    """Check that byte ranges (begin, end, tensor) lie inside [start, end) of `path` and do not overlap."""
    last, previous = start, ""
    for begin, stop, name in sorted(ranges):
        if stop > end:
            raise MegakernelError(
                f"{path} is cut short or damaged: tensor {name} ends at byte {stop} of {end}; fetch the file again"
            )
        if begin < last:
            other = f"tensor {previous}" if previous else "the header"
            raise MegakernelError(f"{path} is damaged: tensor {name} overlaps {other}; fetch the file again")
        last, previous = stop, name
