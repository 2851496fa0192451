"""The format of a program file.

    7 bytes  magic                     1 byte   version
    32       SHA-256 of everything that follows
    8        length of the header      then the header: JSON, and spaces up to a multiple of ALIGNMENT
    then the arrays, int32, in the order in which the header lists them with their lengths

The file may come from anyone, so the type and range of every field are checked before use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import DIM_FIELDS, Dims, Forward
from ..isa.record import WORDS

VERSION = 7
_MAGIC = b"MKPROG\0"
HASHED = 40  # the SHA-256 covers all bytes from this offset on
START = 48  # offset of the header in the file
ALIGNMENT = 64  # the arrays begin at a multiple of this number of bytes in the file
# The maximum length of the header. With sizes and up to 29 phases, it has about 10 kB. A longer header is not decoded.
MOST_HEADER_BYTES = 1 << 20
# The maximum length of a machine's or a phase's name, which tables print. A machine's name may be a
# file name, which has at most 255 bytes.
MOST_NAME = 255
_COUNTS = ("ranks", "workers", "counters")


@dataclass(frozen=True)
class Header:
    """The contents of a program file before the arrays. `arrays` lists the name of each array and its number of
    records or words.
    """

    dims: Dims
    forward: Forward
    machine: str
    ranks: int
    workers: int
    counters: int
    arrays: Sequence[tuple[str, int]]


def encode(fields: dict[str, Any], arrays: Iterable[NDArray[np.int32]]) -> bytes:
    """Return a file whose header has these fields."""
    text = json.dumps(fields, sort_keys=True).encode()
    text += b" " * (-(START + len(text)) % ALIGNMENT)
    payload = len(text).to_bytes(START - HASHED, "little") + text
    payload += b"".join(np.ascontiguousarray(a, dtype="<i4").tobytes() for a in arrays)
    return _MAGIC + bytes([VERSION]) + hashlib.sha256(payload).digest() + payload


def decode(data: bytes, name: str, names: Sequence[str]) -> tuple[Header, dict[str, NDArray[np.int32]]]:
    """Return the header of a file and its arrays, which are views of `data` and must be called `names`. Raises
    MegakernelError, which calls the file `name`, if the file is damaged.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        raise MegakernelError(f"{name} is not a megakernel program")
    if len(data) < START or data[len(_MAGIC)] != VERSION:
        found = data[len(_MAGIC)] if len(data) > len(_MAGIC) else "none"
        raise MegakernelError(
            f"program {name} has format version {found}, but this release reads {VERSION}: compile it again"
        )
    if hashlib.sha256(memoryview(data)[HASHED:]).digest() != data[HASHED - 32 : HASHED]:
        raise MegakernelError(f"program {name} is damaged: its checksum does not match")
    try:
        return _decode(data, names)
    except ValueError as e:
        raise MegakernelError(f"program {name} is damaged: {e}: compile it again") from e


def _decode(data: bytes, names: Sequence[str]) -> tuple[Header, dict[str, NDArray[np.int32]]]:
    size = int.from_bytes(data[HASHED:START], "little")
    if size > min(MOST_HEADER_BYTES, len(data) - START) or (START + size) % ALIGNMENT:
        raise ValueError(f"the file's header cannot have {size} bytes")
    try:
        fields = json.loads(data[START : START + size])
    except (ValueError, RecursionError) as e:
        raise ValueError("the file's header is not JSON") from e
    header = _header(_table(fields, "the file's header", Header.__annotations__), names)
    lengths = {name: length * (WORDS if name.endswith(".records") else 1) for name, length in header.arrays}
    start = START + size
    if start + 4 * sum(lengths.values()) != len(data):
        raise ValueError("the file's arrays do not have the lengths that its header states")
    arrays = {}
    for name, words in lengths.items():
        array = np.frombuffer(data, "<i4", count=words, offset=start).astype(np.int32, copy=False)
        arrays[name] = array.reshape(-1, WORDS) if name.endswith(".records") else array
        start += 4 * words
    return header, arrays


def _header(fields: dict[str, Any], names: Sequence[str]) -> Header:
    sizes = _table(fields["dims"], "dims", [name for name, _ in DIM_FIELDS])
    for name, kind in DIM_FIELDS:
        if kind is int:
            _int32(sizes[name], f"dims.{name}")
        elif isinstance(sizes[name], bool) or not isinstance(sizes[name], (int, float)) or not 0 <= sizes[name] < 1:
            raise ValueError(f"dims.{name} is not a number of at least 0 and below 1")
    for name in _COUNTS:
        _int32(fields[name], name)
    listed = fields["arrays"]
    if not isinstance(listed, list) or [a[:1] if isinstance(a, list) else a for a in listed] != [[n] for n in names]:
        raise ValueError(f"the header's list of arrays must be {', '.join(names)}")
    if any(len(entry) != 2 for entry in listed):
        raise ValueError("an entry in the header's list of arrays is not [name, length]")
    arrays = [(name, _int32(length, f"the length of {name}")) for name, length in listed]
    if any(length < 0 for _, length in arrays):
        raise ValueError("an array's length is negative")
    _table(fields["forward"], "forward", ("prologue", "body", "epilogue"))
    forward = Forward.from_json(fields["forward"])
    for what, name in [("machine", fields["machine"]), *(("a phase", phase.name) for phase in forward)]:
        if not isinstance(name, str) or not name.isprintable() or len(name) > MOST_NAME:
            raise ValueError(f"the name of {what} is not printable text of up to {MOST_NAME} characters")
    return Header(
        Dims(**sizes), forward, fields["machine"], fields["ranks"], fields["workers"], fields["counters"], arrays
    )


def _table(value: Any, what: str, names: Sequence[str] | dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{what} must have the fields {', '.join(names)}")
    return value


def _int32(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{what} is not an integer that fits in 32 bits")
    return value
