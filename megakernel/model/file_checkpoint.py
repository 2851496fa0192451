"""Reads weights from files of any format. A `Naming` says which tensors of a file form each buffer."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError, file_errors, regular
from ..isa import BUFFERS, Buffer, Dtype, Share, Split, all_finite, column_share, row_shares
from ..isa.buffers import weight
from ..isa.dtypes import BLOCKS
from .checkpoint import CHUNK, Checkpoint, Storage, StoredRows, WeightRows, array_of, cut_columns, floats, vector
from .config import ModelConfig
from .families import FAMILIES, forward, places
from .families.family import WEIGHTS
from .rope import rope_table


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. Its last axis is a row; its other axes count rows."""

    path: Path
    shape: tuple[int, ...]
    dtype: Dtype | None  # the type of the elements or blocks that `rows` returns; None for bytes to be decoded
    # Returns rows [start, end), 2-D: bfloat16 as uint16, quantised rows as bytes, a vector as one column.
    rows: Callable[[int, int], NDArray[np.generic]]


Tensors = dict[str, Tensor]
# The tensors of GGUF files with divisors of RoPE's frequencies: for all contexts, for long ones, and for short ones.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def stored(path: Path, shape: tuple[int, ...], dtype: Dtype | None, data: NDArray[np.uint8]) -> Tensor:
    """Return a tensor whose bytes, `data`, are stored as `Tensor.rows` returns them."""
    kind = np.dtype(np.uint8) if dtype is None else dtype.numpy.newbyteorder("<")
    rows = data.reshape(math.prod(shape[:-1] or shape), -1)
    return Tensor(path, shape, dtype, lambda start, end: rows[start:end].view(kind))


@dataclass(frozen=True)
class Naming:
    """The names of a model's tensors in files of one format, and how the files store them."""

    config: ModelConfig
    format: str  # "safetensors" or "gguf"

    def _parts(self, buffer: Buffer) -> tuple[str, ...]:
        parts: tuple[str, ...] = getattr(FAMILIES[self.config.family].tensors(buffer), self.format)
        return parts

    def names(self, buffer: Buffer, layer: int) -> list[str]:
        """Return the names of the tensors that form a buffer, in order. `_with_pieces` explains the names NAME[i]."""
        config, parts = self.config, self._parts(buffer)
        if not (config.experts and weight(buffer).per_expert):
            # Dense layers have no router. So the router of the first layer with experts is read, but not used.
            routed = max(layer, config.dense_layers) if buffer in (Buffer.W_ROUTER, Buffer.B_ROUTER) else layer
            return [part.format(routed) for part in parts]
        wide, _, count = self.wide(buffer, layer)
        own = range(config.experts - count)
        names = [part.format(layer, expert=expert) for expert in own for part in parts]
        return names + [f"{name}[{piece}]" for piece in range(count) for name in wide]

    def wide(self, buffer: Buffer, layer: int) -> tuple[list[str], int, int]:
        """Return the tensor names of the MLP that all tokens of a layer use, its width, and the number of its pieces.
        Each piece counts as an expert. Without such an MLP, there are no names and no pieces."""
        config, family = self.config, FAMILIES[self.config.family]
        width, count, table = config.shared_ffn, config.shared_experts, family.shared
        if layer < config.dense_layers:
            width, count, table = config.dense_ffn, config.experts, WEIGHTS
        names = getattr(table[buffer], self.format) if count else ()
        return [name.format(layer) for name in names], width, count

    def unused(self, name: str) -> bool:
        """Whether a file may have the tensor `name`, although no buffer contains it."""
        layer = name.removeprefix("model.layers.").removeprefix("blk.").partition(".")[0]
        later = layer.isdecimal() and int(layer) >= self.config.layers  # predicts tokens after the next one
        later &= "num_nextn_predict_layers" in FAMILIES[self.config.family].keys
        return later or name.endswith(("rotary_emb.inv_freq", *ROPE_FACTORS))

    def stacked(self, buffer: Buffer) -> bool:
        """Whether one tensor has the weights of all experts of a layer."""
        return self.config.experts > 0 and weight(buffer).per_expert and "{expert}" not in self._parts(buffer)[0]

    def halved(self, buffer: Buffer) -> int:
        """How many of a buffer's tensors, counted from the first, store the two rows of a RoPE pair half a head apart.
        The other tensors store them side by side."""
        return 0 if self.format in FAMILIES[self.config.family].adjacent else weight(buffer).rotated

    def scaling(self, buffer: Buffer) -> tuple[float, float]:
        """Return the numbers `more` and `divisor`: a buffer's weights are (the file's weights + more) / divisor."""
        minus_one = self.format == "safetensors" and FAMILIES[self.config.family].norms_minus_one
        more = 1.0 if minus_one and weight(buffer).norm else 0.0
        return more, self.config.logits_scaling if buffer is Buffer.FINAL_NORM else 1.0


class FileCheckpoint:
    """A Checkpoint that reads from files. The constructor checks every tensor's name and shape, but reads no weights.

    `widened` counts the stored bytes that must be converted when they are read, by the name of their type.
    `left_out` counts tensors that encode images, which are not supported. With `some`, weights may be absent.
    """

    def __init__(
        self,
        name: str,
        tensors: Tensors,
        naming: Naming,
        widened: Mapping[str, int] | None = None,
        left_out: int = 0,
        some: bool = False,
    ) -> None:
        config = naming.config
        self.name = name
        self.widened, self.left_out = widened or {}, left_out
        self.config = config
        self._tensors = tensors = _with_pieces(tensors, naming)
        self._naming = naming
        _check(tensors, naming, some)
        whole = {} if some else dict(_expected(config))
        matrices = {buffer: self._layout(buffer) for buffer in whole if BUFFERS[buffer].matrix}
        kinds = {buffer: {part.dtype for parts in s.layers for part in parts} for buffer, s in matrices.items()}
        self.dtype = Dtype.F32 if set().union(*kinds.values()) == {Dtype.F32} else Dtype.BF16
        self.storage = {buffer: s for buffer, s in matrices.items() if kinds[buffer] - {Dtype.F32, Dtype.BF16}}
        if kinds.get(Buffer.W_ROUTER) == {Dtype.F32}:  # rounding could change which experts are chosen
            self.storage[Buffer.W_ROUTER] = matrices[Buffer.W_ROUTER]
        if config.tied and Buffer.EMBED in self.storage:
            self.storage[Buffer.LM_HEAD] = self.storage[Buffer.EMBED]

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        if buffer is Buffer.INV_FREQ:
            return [vector(rope_table(self.config, layer))]
        source = Buffer.EMBED if buffer is Buffer.LM_HEAD and self.config.tied else buffer
        wanted = None if buffer in self.storage else BUFFERS[buffer].resolve_dtype(split.model)
        # `begin` counts, for each tensor, the rows that earlier matrices of the buffer have taken.
        out, begin = [], Counter[str]()
        names, halved = self._naming.names(source, layer), self._naming.halved(source)
        more, divisor = self._naming.scaling(buffer)
        for index, (name, share) in enumerate(zip(names, row_shares(buffer, split), strict=True)):
            if name in self._tensors:
                part = self._read(name, share._replace(first=begin[name] + share.first), buffer, split, wanted)
            else:  # an absent bias, which `_check` has accepted
                part = vector(np.zeros(share.size, np.float32))
            if (more, divisor) != (0.0, 1.0):
                part = vector((part.data.view(np.float32) + np.float32(more)) / np.float32(divisor))
            begin[name] += share.whole
            if index < halved:
                part = WeightRows(part.dtype, _interleave(part.data, self.config))
            out.append(part)
        return out

    def places(self) -> list[tuple[Buffer, int]]:
        """Return the buffers and layers that the file has. Raises MegakernelError if one lacks some of its tensors."""
        found = []
        for buffer, layer in _expected(self.config):
            names = self._naming.names(buffer, layer)
            absent = [name for name in names if name not in self._tensors]
            if absent and len(absent) < len(names):
                other = next(name for name in names if name not in absent)
                raise MegakernelError(f"tensor {absent[0]} is missing: it must come together with {other}")
            found += [] if absent else [(buffer, layer)]
        return [*found, (Buffer.LM_HEAD, 0)] if self.config.tied and (Buffer.EMBED, 0) in found else found

    def _layout(self, buffer: Buffer) -> Storage:
        """Return the type and the number of rows of each tensor that forms the buffer."""
        shares = row_shares(buffer, Split(self.config.sizes(Dtype.F32)))
        layers = BUFFERS[buffer].layers(self.config)
        parts = (zip(self._naming.names(buffer, layer), shares, strict=True) for layer in layers)
        return Storage(tuple(tuple(StoredRows(_type(self._tensors[n]), s.whole) for n, s in layer) for layer in parts))

    def _read(self, name: str, share: Share, buffer: Buffer, split: Split, dtype: Dtype | None) -> WeightRows:
        """Return a rank's part of a tensor in the float type `dtype`. The result is a view of the file if the tensor
        has this type, or if `dtype` is None. Raises MegakernelError if a weight is NaN or infinite: such a weight would
        make every token meaningless, and later errors could not name the cause."""
        tensor, end = self._tensors[name], share.first + share.size
        kind, shape = _type(tensor), tensor.shape
        length = 1 if BUFFERS[buffer].matrix else math.prod(shape[1:])

        def part(start: int, stop: int) -> WeightRows:
            # A tensor's row may be a whole vector, such as an expert's bias. A buffer's row is one element of it.
            rows = tensor.rows(start // length, -(-stop // length))
            if BUFFERS[buffer].matrix and len(shape) == 1:  # a matrix with one row
                rows = tensor.rows(0, shape[0]).reshape(1, -1)
            elif length > 1:
                rows = rows.reshape(-1, 1)[start % length :][: stop - start]
            if not all_finite(rows, kind):
                raise MegakernelError(
                    f"tensor {name} in {tensor.path} contains a NaN or an infinity: fetch the file again"
                )
            return cut_columns(WeightRows(kind, rows.view(np.uint8)), buffer, split)

        if dtype is None or dtype is kind:
            return part(share.first, end)
        column = column_share(buffer, split)
        step = max(1, CHUNK // column.whole)
        parts = (part(start, min(start + step, end)) for start in range(share.first, end, step))
        return WeightRows(dtype, floats(parts, (share.size, column.size), dtype).view(np.uint8))


def _interleave(rows: NDArray[Any], config: ModelConfig, *, back: bool = False) -> NDArray[Any]:
    """Reorder rows of q or k so that the two rows of each RoPE pair are adjacent. `back` restores Hugging Face's order:
    if RoPE rotates the first R rows of a head, rows i and i + R / 2 form a pair. All other rows stay where they are."""
    rotated = config.rope.dims or config.head_dim
    order = np.arange(config.head_dim)
    order[:rotated] = order[:rotated].reshape((-1, 2) if back else (2, -1)).T.ravel()
    return rows.reshape(-1, config.head_dim, rows.shape[1])[:, order].reshape(rows.shape)


def tensors_of(checkpoint: Checkpoint, naming: Naming, dtype: Dtype) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield all tensors (name, array) that a file with this naming must have, in the order of `expected_shapes`.
    bfloat16 is stored as uint16."""
    split = Split(checkpoint.config.sizes(dtype))
    shapes = expected_shapes(naming)
    for buffer, layer in _expected(checkpoint.config):
        left = array_of(checkpoint, buffer, layer, split)
        more, divisor = naming.scaling(buffer)
        if (more, divisor) != (0.0, 1.0):
            left = np.multiply(left, np.float32(divisor)) - np.float32(more)
        parts = defaultdict[str, list[NDArray[np.generic]]](list)
        for index, (name, share) in enumerate(zip(naming.names(buffer, layer), row_shares(buffer, split), strict=True)):
            part, left = np.split(left, [share.whole])
            halved = index < naming.halved(buffer)
            parts[name].append(_interleave(part, checkpoint.config, back=True) if halved else part)
        for name, own in parts.items():
            yield name, np.concatenate(own).reshape(shapes[name])


def expected_shapes(naming: Naming) -> dict[str, tuple[int, ...]]:
    """Return the name and the shape of every tensor that a file with this naming must have."""
    config = naming.config
    expected: dict[str, tuple[int, ...]] = {}
    split = Split(config.sizes(Dtype.F32))
    for buffer, layer in _expected(config):
        columns = (column_share(buffer, split).whole,) if BUFFERS[buffer].matrix else ()
        rows = Counter[str]()
        for name, share in zip(naming.names(buffer, layer), row_shares(buffer, split), strict=True):
            rows[name] += share.whole
        for name, count in rows.items():
            stack = (config.experts - config.shared_experts,) if naming.stacked(buffer) and name[-1] != "]" else ()
            expected[name] = (*stack, count // math.prod(stack), *columns)
    return expected


def _expected(config: ModelConfig) -> list[tuple[Buffer, int]]:
    """The buffers and layers whose weights the files of a model contain."""
    without = {Buffer.INV_FREQ} | ({Buffer.LM_HEAD} if config.tied else set())
    return [place for place in places(config) if place[0] not in without]


def _check(tensors: Tensors, naming: Naming, some: bool) -> None:
    """Raise MegakernelError if a tensor is unknown, has a wrong shape or, unless `some` is set, is missing."""
    expected = expected_shapes(naming)
    # GGUF files leave out biases that are zero.
    biases = [p.bias for p in forward(naming.config) if p.bias is not None and naming.format == "gguf"]
    optional = {
        name for buffer in biases for layer in range(naming.config.layers) for name in naming.names(buffer, layer)
    }
    if missing := [name for name in expected if not some and name not in {*tensors, *optional}]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        file = next((tensor.path for tensor in tensors.values()), "the checkpoint")
        raise MegakernelError(f"{file} lacks tensor {missing[0].partition('[')[0]}{more} that the config asks for")
    for name, shape in expected.items():
        if name in tensors:
            _check_shape(name, tensors[name], shape)
    for name, tensor in tensors.items():
        if name not in expected and not naming.unused(name):
            raise MegakernelError(
                f"tensor {name} in {tensor.path} belongs to no part of the model that the config describes"
            )
        if name in expected and tensor.dtype is None:
            raise MegakernelError(
                f"tensor {name} in {tensor.path} has type U8, which is not supported: use one of F32, F16, BF16"
            )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise MegakernelError if a tensor's shape is not `shape`. Axes of length 1 do not count: files may lack them."""
    if [size for size in tensor.shape if size > 1] != [size for size in shape if size > 1]:
        raise MegakernelError(
            f"tensor {name} in {tensor.path} has shape {list(tensor.shape)}; the config asks for {list(shape)}"
        )


def _type(tensor: Tensor) -> Dtype:
    """The type of a tensor that `_check` has accepted."""
    assert tensor.dtype is not None
    return tensor.dtype


def _with_pieces(tensors: Tensors, naming: Naming) -> Tensors:
    """Divide MLPs that all tokens use into pieces as wide as an expert, so that they run as experts. Zeros fill up the
    last piece. The tensor NAME becomes NAME[0], NAME[1] and so on."""
    config, out = naming.config, dict(tensors)

    def cut(name: str, width: int, first: int, down: bool, start: int, end: int) -> NDArray[np.generic]:
        whole = tensors[name]
        if not down:
            rows = whole.rows(min(first + start, width), min(first + end, width))
            return np.pad(rows, ((0, end - start - len(rows)), (0, 0)))
        kind, rows = _type(whole), whole.rows(start, end)
        if kind.quantised and first % BLOCKS[kind].weights:
            raise MegakernelError(f"{whole.path}: cannot cut tensor {name} inside a block of quantised weights")
        part = rows.view(np.uint8)[:, kind.row_bytes(first) : kind.row_bytes(min(first + config.ffn, width))]
        return np.pad(part, ((0, 0), (0, kind.row_bytes(config.ffn) - part.shape[1]))).view(rows.dtype)

    for layer, down in product(range(config.layers), (False, True)):
        names, width, count = naming.wide(Buffer.W_DOWN if down else Buffer.W_GATE_UP, layer)
        whole, piece = ((config.hidden, n) if down else (n, config.hidden) for n in (width, config.ffn))
        for name in (name for name in names if out.pop(name, None)):
            _check_shape(name, tensors[name], whole)
            for number in range(count):
                rows = partial(cut, name, width, number * config.ffn, down)
                out[f"{name}[{number}]"] = replace(tensors[name], shape=piece, rows=rows)
    return out


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map a file into memory and return its bytes, which are read on access. An empty file is an error."""
    try:
        with file_errors(f"read {path}"):
            return np.memmap(regular(path), dtype=np.uint8, mode="r").view(np.ndarray)
    except ValueError as e:
        raise MegakernelError(f"{path} is empty: fetch the file again") from e


def damaged(path: Path, why: str) -> MegakernelError:
    """Return the error for a file with contents that cannot be right."""
    return MegakernelError(f"{path} is damaged: {why}; fetch the file again")


def check_ranges(path: Path, ranges: list[tuple[int, int, str]], start: int, end: int) -> None:
    """Raise MegakernelError unless byte ranges (begin, end, tensor) are disjoint and inside [start, end)."""
    last, previous = start, ""
    for begin, stop, name in sorted(ranges):
        if stop > end:
            raise damaged(path, f"it has {end} bytes, but tensor {name} ends at byte {stop}")
        if begin < last:
            other = f"tensor {previous}" if previous else "the header"
            raise damaged(path, f"tensor {name} overlaps {other}")
        last, previous = stop, name
