"""Records and segments put together by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megakernel.isa import BY_NAME
from megakernel.isa.record import WORDS, Records, encode
from megakernel.program import Segment


def record(name: str, *operands: int, waits: Sequence[int] = (), signals: Sequence[int] = ()) -> Records:
    """One record; waits and signals are words."""
    kind = BY_NAME[name]
    if len(operands) != len(kind.operands):
        raise ValueError(f"{name} takes {kind.operands}")
    return encode(kind.opcode, operands, waits, signals)


def segment(*streams: Sequence[Records]) -> Segment:
    records = [r for stream in streams for r in stream]
    offsets = np.cumsum([0, *map(len, streams)]).astype(np.int32)
    return Segment(np.array(records, np.int32).reshape(-1, WORDS), offsets)
