"""Defines the format of a trace: one 32-byte record per interval. `headers.py` writes the C++ struct."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import MegakernelError, file_errors, regular, whole_file


class Role(IntEnum):
    """The kind of thread or warp that did the work of an interval. On a CPU, a worker is one thread with the role
    WORKER. On a GPU, each other role is a kind of warp. A LOADER loads weights, and waits only for free pages of shared
    memory. An INPUT_LOADER waits for counters and then loads activations."""

    WORKER = 0
    CONTROLLER = 1
    LOADER = 2
    CONSUMER = 3
    STORER = 4
    INPUT_LOADER = 5


class IntervalKind(IntEnum):
    FETCH = 0
    PAGE_WAIT = 1
    COUNTER_WAIT = 2
    LOAD = 3
    COMPUTE = 4
    STORE = 5


FIELDS: tuple[tuple[str, str, str], ...] = (
    ("begin", "u8", "ticks"),
    ("end", "u8", "ticks"),
    ("instruction", "u4", "index of the record in its segment (prologue, body or epilogue); `layer` tells the segment"),
    ("launch", "u4", "number of the launch, counted from 1 when the trace starts"),
    ("worker", "u2", ""),
    ("layer", "u2", "layer number, or PROLOGUE or EPILOGUE outside the layers"),
    ("rank", "u1", ""),
    ("role", "u1", "Role"),
    ("kind", "u1", "IntervalKind"),
    ("slot", "u1", "index of the wait word that was satisfied last, if kind is COUNTER_WAIT"),
)
DTYPE = np.dtype([(name, kind) for name, kind, _ in FIELDS])
PROLOGUE, EPILOGUE = 0xFFFE, 0xFFFF
Intervals = NDArray[np.void]

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1)]
_MOST_WORK = 1e30  # limit of the FLOPs or bytes of an attention instruction, so that sums stay finite

_MAGIC = b"MKTRACE1"


@dataclass(frozen=True)
class TraceHeader:
    """Facts about a whole trace."""

    program: str  # the hash of the traced program
    source: str  # what wrote the trace: reference, cpu, cuda, protocol or simulator
    tick_s: Annotated[float, msgspec.Meta(ge=1e-15, le=1)]  # no clock ticks faster
    read_s: _Seconds  # the time of reading the clock
    clock_error_s: _Seconds  # the largest possible offset between the clocks of ranks (0 if they share one)
    dropped: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # intervals that were lost because memory was full
    machine: str = ""  # the machine that a simulator assumed; "" is the program's
    attention: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None  # in a file, the shape of `Trace.attention`


@dataclass(frozen=True)
class Trace:
    """A trace: intervals in which workers computed, loaded, stored or waited. `attention` [launches, ranks, slots, 2]
    has the FLOPs and the bytes of K and V of each attention instruction (slot) in a layer. The program does not have
    these numbers, because they depend on the step's sequences. None means not recorded."""

    header: TraceHeader
    intervals: Intervals  # an array of DTYPE, sorted by (rank, worker, begin)
    attention: NDArray[np.float64] | None = None

    def save(self, path: Path) -> None:
        fields, block = asdict(self.header), b""
        if self.attention is not None:
            fields["attention"], block = self.attention.shape, self.attention.tobytes()
        header = json.dumps(fields).encode()
        with whole_file(path, f"trace {path}") as part:
            part.write_bytes(_MAGIC + len(header).to_bytes(8, "little") + header + block + self.intervals.tobytes())

    @staticmethod
    def load(path: Path) -> Trace:
        with file_errors(f"read trace {path}"):
            data = regular(path).read_bytes()
        if data[:8] != _MAGIC:
            raise MegakernelError(f"{path} is not a trace file of this version: record it again")
        start = 16 + int.from_bytes(data[8:16], "little")
        try:
            header = msgspec.json.decode(data[16:start], type=TraceHeader)
            shape, attention = header.attention, None
            if not (header.program + header.source + header.machine).isprintable():
                raise ValueError("the header's program, source or machine is not printable text")
            if shape is not None:
                attention = np.frombuffer(data, np.float64, math.prod(shape), start).reshape(shape)
                start += attention.nbytes
                if not ((attention >= 0) & (attention < _MOST_WORK)).all():
                    raise ValueError(f"the FLOPs or bytes of an attention slot are not from 0 to {_MOST_WORK:g}")
            intervals = np.frombuffer(data, DTYPE, offset=start)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as e:
            raise MegakernelError(f"trace file {path} is damaged: {str(e)[:200]}: record it again") from e
        return Trace(replace(header, attention=None), intervals, attention)
