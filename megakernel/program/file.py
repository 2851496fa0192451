"""Loads program files. A file may come from anyone, so every field's type and range are checked before it is used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MegakernelError, file_errors, regular
from ..isa import DIM_FIELDS, Dims, Forward
from ..isa.record import WORDS
from .checks import check
from .program import ALIGNMENT, HASHED, MAGIC, SEGMENTS, START, TOTALS, VERSION, Program, Segment

# The maximum length of the header in bytes, which needs about 10 kB. A longer one is not decoded.
MOST_HEADER_BYTES = 1 << 20
# The maximum length of the name of a machine or a phase, because tables print it. A machine's name may be a file name,
# which has at most 255 bytes.
MOST_NAME = 255
_COUNTS = ("ranks", "workers", "counters")
_SEGMENTS = (*SEGMENTS, "queues")
# The allowed names of phases, which appear in HTML pages, tables and command lines.
_PHASE_NAME = rf"[\w.+-]{{1,{MOST_NAME}}}"
_ARRAYS = (*(f"{name}.{what}" for name in _SEGMENTS for what in ("records", "offsets")), *TOTALS)


def load_program(path: Path) -> Program:
    """Load a program file. Raises MegakernelError if the file cannot be read or the program is invalid."""
    with file_errors(f"read program {path}"):
        return program_from_bytes(regular(path).read_bytes(), str(path))


def program_from_bytes(data: bytes, name: str) -> Program:
    """Return the program that `Program.to_bytes` has converted to `data`. Raises MegakernelError, which calls the
    program `name`, if it is invalid."""
    if data[: len(MAGIC)] != MAGIC:
        raise MegakernelError(f"{name} is not a megakernel program")
    if len(data) < START or data[len(MAGIC)] != VERSION:
        found = data[len(MAGIC)] if len(data) > len(MAGIC) else "none"
        raise MegakernelError(
            f"program {name} has format version {found}, but this release reads {VERSION}: compile it again"
        )
    if hashlib.sha256(memoryview(data)[HASHED:]).digest() != data[HASHED - 32 : HASHED]:
        raise MegakernelError(f"program {name} is damaged: its checksum does not match")
    try:
        program = _decode(data)
    except ValueError as e:
        raise MegakernelError(f"program {name} is damaged: {e}: compile it again") from e
    check(program, f"program {name}")
    return program


def _decode(data: bytes) -> Program:
    """Decode a program whose checksum is right. Its arrays are views of `data`. Raises ValueError."""
    size = int.from_bytes(data[HASHED:START], "little")
    if size > min(MOST_HEADER_BYTES, len(data) - START) or (START + size) % ALIGNMENT:
        raise ValueError(f"the file's header cannot have {size} bytes")
    try:
        fields = json.loads(data[START : START + size])
    except (ValueError, RecursionError) as e:
        raise ValueError("the file's header is not JSON") from e
    _table(fields, "the file's header", ("dims", "forward", "machine", *_COUNTS, "arrays"))
    dims = _dims(fields["dims"])
    ranks, workers, counters = (_int32(fields[name], name) for name in _COUNTS)
    lengths = _lengths(fields["arrays"])
    _table(fields["forward"], "forward", SEGMENTS)
    forward = Forward.from_json(fields["forward"])
    machine = fields["machine"]
    if not isinstance(machine, str) or not machine.isprintable() or len(machine) > MOST_NAME:
        raise ValueError(f"the name of machine is not printable text of up to {MOST_NAME} characters")
    for phase in forward:
        if not isinstance(phase.name, str) or not re.fullmatch(_PHASE_NAME, phase.name, re.ASCII):
            raise ValueError(f"the name of a phase is not 1 to {MOST_NAME} letters, digits or any of . _ + -")
    arrays, start = {}, START + size
    if start + 4 * sum(lengths.values()) != len(data):
        raise ValueError("the file's arrays do not have the lengths that its header states")
    for name, words in lengths.items():
        array = np.frombuffer(data, "<i4", count=words, offset=start).astype(np.int32, copy=False)
        arrays[name] = array.reshape(-1, WORDS) if name.endswith(".records") else array
        start += 4 * words
    for name in TOTALS:
        if min(ranks, counters) < 1 or len(arrays[name]) != ranks * counters:
            raise ValueError(
                f"{name} has {len(arrays[name])} words, not one for each of {counters} counters of {ranks} ranks"
            )
    segments: dict[str, Any] = {n: Segment(arrays[f"{n}.records"], arrays[f"{n}.offsets"]) for n in _SEGMENTS}
    totals: dict[str, Any] = {name: arrays[name].reshape(ranks, counters) for name in TOTALS}
    return Program(dims, forward, fields["machine"], ranks, workers, counters, **segments, **totals)


def _dims(sizes: Any) -> Dims:
    _table(sizes, "dims", [name for name, _ in DIM_FIELDS])
    for name, kind in DIM_FIELDS:
        if kind is int:
            _int32(sizes[name], f"dims.{name}")
        elif isinstance(sizes[name], bool) or not isinstance(sizes[name], (int, float)) or not 0 <= sizes[name] < 1e9:
            raise ValueError(f"dims.{name} is not a number of at least 0 and below 1e9")
    return Dims.of(**sizes)


def _lengths(listed: Any) -> dict[str, int]:
    """Return the number of 32-bit words of each array. `listed` is the header's list of arrays and their lengths."""
    if not isinstance(listed, list) or [a[:1] if isinstance(a, list) else a for a in listed] != [[n] for n in _ARRAYS]:
        raise ValueError(f"the header's list of arrays must be {', '.join(_ARRAYS)}")
    if any(len(entry) != 2 for entry in listed):
        raise ValueError("an entry in the header's list of arrays is not [name, length]")
    if any(_int32(length, f"the length of {name}") < 0 for name, length in listed):
        raise ValueError("an array's length is negative")
    return {name: length * (WORDS if name.endswith(".records") else 1) for name, length in listed}


def _table(value: Any, what: str, names: Sequence[str]) -> None:
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{what} must have the fields {', '.join(names)}")


def _int32(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{what} is not an integer that fits in 32 bits")
    return value
