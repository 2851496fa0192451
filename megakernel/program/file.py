"""Loads program files. A file may come from anyone, so every field's type and range are checked before it is used."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ..errors import MegakernelError, file_errors, regular
from ..isa import DIM_FIELDS, Dims, Forward
from ..isa.record import WORDS
from .checks import check
from .program import ALIGNMENT, HASHED, MAGIC, SEGMENTS, START, TOTALS, VERSION, Program, Segment

# The maximum length of a program file's header in bytes. Headers need about 10 kB. Longer ones are not decoded.
MOST_HEADER_BYTES = 1 << 20
# The maximum length of the name of a machine or a phase, because tables print it. A machine's name may be a file name,
# which has at most 255 bytes.
MOST_NAME = 255
_SEGMENTS = (*SEGMENTS, "queues")
# The allowed names of phases, which appear in HTML pages, tables and command lines.
_PHASE_NAME = rf"[\w.+-]{{1,{MOST_NAME}}}"
_ARRAYS = [*(f"{name}.{what}" for name in _SEGMENTS for what in ("records", "offsets")), *TOTALS]

_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_KINDS: dict[type, Any] = {int: _Int32, float: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]}
_HEADER = msgspec.defstruct(
    "Header",
    [
        (
            "dims",
            msgspec.defstruct("Sizes", [(name, _KINDS[kind]) for name, kind in DIM_FIELDS], forbid_unknown_fields=True),
        ),
        ("forward", Forward),
        ("machine", Annotated[str, msgspec.Meta(max_length=MOST_NAME)]),
        *((name, _Int32) for name in ("ranks", "workers", "counters")),
        ("arrays", list[tuple[str, _Length]]),
    ],
    forbid_unknown_fields=True,
)


def load_program(path: Path) -> Program:
    """Load a program file. Raises MegakernelError if the file cannot be read or the program is invalid."""
    with file_errors(f"read program {path}"):
        return program_from_bytes(regular(path).read_bytes(), str(path))


def program_from_bytes(data: bytes, name: str) -> Program:
    """Return the program that `Program.to_bytes` has converted to `data`. Raises MegakernelError, which calls the
    program `name`, if it is invalid."""
    if data[: len(MAGIC)] != MAGIC:
        raise MegakernelError(f"{name} is not a megakernel program: write one with megakernel compile")
    if len(data) < START or data[len(MAGIC)] != VERSION:
        found = data[len(MAGIC)] if len(data) > len(MAGIC) else "none"
        raise MegakernelError(
            f"program {name} has format version {found}, but this release reads {VERSION}: compile it again"
        )
    if hashlib.sha256(memoryview(data)[HASHED:]).digest() != data[HASHED - 32 : HASHED]:
        raise MegakernelError(f"program {name} is damaged: its checksum does not match: compile it again")
    try:
        program = _decode(data)
    except (ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise MegakernelError(f"program {name} is damaged: {str(e)[:200]}: compile it again") from e
    check(program, f"program {name}")
    return program


def _decode(data: bytes) -> Program:
    """Decode a program whose checksum is right, as views of `data`. Raises ValueError or MsgspecError."""
    size = int.from_bytes(data[HASHED:START], "little")
    if size > min(MOST_HEADER_BYTES, len(data) - START) or (START + size) % ALIGNMENT:
        raise ValueError(f"the header's length of {size} bytes is too large or not aligned")
    header: Any = msgspec.json.decode(data[START : START + size], type=_HEADER)
    ranks, counters = header.ranks, header.counters
    forward = Forward.of(*header.forward.segments)
    if not header.machine.isprintable():
        raise ValueError("the machine's name is not printable text")
    for phase in forward:
        if not re.fullmatch(_PHASE_NAME, phase.name, re.ASCII):
            raise ValueError(
                f"phase name {phase.name[:9]!r} must be 1 to {MOST_NAME} letters, digits or any of . _ + -"
            )
    if [name for name, _ in header.arrays] != _ARRAYS:
        raise ValueError(f"the header's list of arrays must be {', '.join(_ARRAYS)}")
    lengths = {name: length * (WORDS if name.endswith(".records") else 1) for name, length in header.arrays}
    arrays, start = {}, START + size
    if start + 4 * sum(lengths.values()) != len(data) or {lengths[name] for name in TOTALS} != {ranks * counters}:
        raise ValueError("the file's arrays do not have the lengths that its header states")
    for name, words in lengths.items():
        array = np.frombuffer(data, "<i4", count=words, offset=start).astype(np.int32, copy=False)
        arrays[name] = array.reshape(-1, WORDS) if name.endswith(".records") else array
        start += 4 * words
    segments: dict[str, Any] = {n: Segment(arrays[f"{n}.records"], arrays[f"{n}.offsets"]) for n in _SEGMENTS}
    totals: dict[str, Any] = {name: arrays[name].reshape(ranks, counters) for name in TOTALS}
    dims = Dims.of(**msgspec.structs.asdict(header.dims))
    return Program(dims, forward, header.machine, ranks, header.workers, counters, **segments, **totals)
