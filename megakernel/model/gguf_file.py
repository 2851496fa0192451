"""Reads GGUF files, versions 2 and 3: metadata, tensor table, and dequantised rows.

ggml's `docs/gguf.md` describes the layout. The reader of the `gguf` package trusts every count and length, and keeps an
array for each string. This reader first checks each count and length against a limit or the file's size. Only
dequantisation uses the package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Dtype
from .checkpoint import CHUNK
from .file_checkpoint import check_ranges, map_file
from .limits import MOST_ALIGNMENT, MOST_METADATA_ELEMENTS, MOST_STRING_BYTES

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


class _Tensor(NamedTuple):
    type: GGMLQuantizationType
    begin: int  # offset from the start of the file, in bytes
    end: int


class _Cursor:
    """Reads the bytes of a file in order, from `offset` on. Reading past the end of the file is an error."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self._path, self._data, self.offset = path, data, 0
        self._elements = 0

    def bytes(self, size: int) -> bytes:
        begin = self.offset
        if size > len(self._data) - begin:
            raise MegakernelError(
                f"{self._path} is cut short or damaged: it declares {size} bytes from byte {begin} on, but ends at "
                f"byte {len(self._data)}; fetch the file again"
            )
        self.offset += size
        return self._data[begin : begin + size].tobytes()

    def u32(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.bytes(8), "little")

    def string(self) -> str:
        size = self.u64()
        if size > MOST_STRING_BYTES:
            raise MegakernelError(
                f"{self._path} is damaged: the string at byte {self.offset} has {size} bytes, more than the limit of "
                f"{MOST_STRING_BYTES}"
            )
        return self.bytes(size).decode("utf-8")

    def count(self, number: int) -> int:
        """Add `number`, the number of metadata elements that follow, to the total, and return `number`. Raises
        MegakernelError if the total is too large.
        """
        self._elements += number
        if self._elements > MOST_METADATA_ELEMENTS:
            raise MegakernelError(
                f"{self._path} is damaged: its metadata up to byte {self.offset} declares {self._elements} elements, "
                f"more than the limit of {MOST_METADATA_ELEMENTS}"
            )
        return number

    def value(self) -> Any:
        kind = self.u32()
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            kind, length = self.u32(), self.count(self.u64())
            if kind == GGUFValueType.STRING:
                return [self.string() for _ in range(length)]
            return self._numbers(kind, length)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, length: int) -> list[Any]:
        if kind not in _SCALARS:
            raise MegakernelError(f"{self._path} is damaged: value type {kind} before byte {self.offset} is unknown")
        dtype = np.dtype(_SCALARS[kind])
        numbers: list[Any] = np.frombuffer(self.bytes(length * dtype.itemsize), dtype).tolist()
        return numbers


# `rows` returns tensors of these types as they are stored. It converts tensors of all other types to float32.
_KEPT = {GGMLQuantizationType[kind.name]: kind for kind in Dtype if kind is not Dtype.I32}


class GgufFile:
    """A GGUF file as a TensorFile. The values of `metadata` are numbers, strings, and lists of either."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._bytes = map_file(path)
        try:
            self._parse(_Cursor(path, self._bytes))
        except UnicodeDecodeError as e:
            raise MegakernelError(
                f"{path} is damaged: a string in its header is not UTF-8; fetch the file again"
            ) from e

    def where(self, name: str) -> Path:
        return self.path

    def dtype(self, name: str) -> Dtype:
        return _KEPT.get(self._tensors[name].type, Dtype.F32)

    def rows(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        tensor, shape = self._tensors[name], self.shapes[name]
        columns = math.prod(shape[1:])
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        row_bytes = columns // block * block_bytes
        stop = tensor.begin + min(end, shape[0]) * row_bytes
        rows = self._bytes[tensor.begin + start * row_bytes : stop].reshape(-1, row_bytes)
        if tensor.type in _KEPT:
            return rows.view(_KEPT[tensor.type].numpy.newbyteorder("<"))
        values, step = np.empty((len(rows), columns), np.float32), max(1, CHUNK // columns)
        for first in range(0, len(rows), step):
            values[first : first + step] = dequantize(rows[first : first + step], tensor.type)
        return values

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.bytes(4) != b"GGUF":
            raise MegakernelError(f"{self.path} is not a GGUF file")
        version = cursor.u32()
        if version not in (2, 3):
            raise MegakernelError(
                f"{self.path} has GGUF version {version}; only 2 and 3, in little-endian byte order, are supported"
            )
        tensors, entries = cursor.count(cursor.u64()), cursor.count(cursor.u64())
        for _ in range(entries):
            key = cursor.string()
            if key in self.metadata:
                raise MegakernelError(f"{self.path} is damaged: metadata key {key} appears twice")
            self.metadata[key] = cursor.value()
        table = [self._tensor_entry(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
            raise MegakernelError(
                f"{self.path} is damaged: general.alignment is {alignment}, not 1 to {MOST_ALIGNMENT}"
            )
        start = -(-cursor.offset // alignment) * alignment
        for name, type_, offset, size in table:
            self._tensors[name] = _Tensor(type_, start + offset, start + offset + size)
        ranges = [(t.begin, t.end, name) for name, t in self._tensors.items()]
        check_ranges(self.path, ranges, start, len(self._bytes))

    def _tensor_entry(self, cursor: _Cursor) -> tuple[str, GGMLQuantizationType, int, int]:
        """Read one entry of the tensor table: return the tensor's name, type, offset and size in bytes, and add its
        shape to `shapes`, slowest axis first.
        """
        name, axes = cursor.string(), cursor.u32()
        if name in self.shapes or not 1 <= axes <= 4:
            what = "appears twice" if name in self.shapes else f"has {axes} axes"
            raise MegakernelError(f"{self.path} is damaged: tensor {name} {what}")
        sizes = [cursor.u64() for _ in range(axes)]
        kind, offset = cursor.u32(), cursor.u64()
        try:
            type_ = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[type_]
            dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_)
        except (ValueError, KeyError) as e:
            raise MegakernelError(f"tensor {name} in {self.path} has type {kind}, unknown to the gguf package") from e
        except NotImplementedError as e:
            raise MegakernelError(
                f"tensor {name} in {self.path} has type {type_.name}, which the gguf package cannot read"
            ) from e
        if 0 in sizes or sizes[0] % block or (axes == 1 and block > 1):
            raise MegakernelError(
                f"{self.path} is damaged: tensor {name} has shape {sizes[::-1]}, which type {type_.name} does not allow"
            )
        self.shapes[name] = tuple(reversed(sizes))
        return name, type_, offset, math.prod(sizes) // block * block_bytes
