"""Records and segments put together by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megakernel.isa import Phase
from megakernel.isa.record import WORDS, Records, encode
from megakernel.program import Segment


def record(phase: Phase, *operands: int, waits: Sequence[int] = (), signals: Sequence[int] = ()) -> Records:
    """One record of a phase; waits and signals are words."""
    if len(operands) != len(phase.operands):
        raise ValueError(f"{phase.name} takes {phase.operands}")
    return encode(phase.number, operands, waits, signals)


def segment(*streams: Sequence[Records]) -> Segment:
    records = [r for stream in streams for r in stream]
    offsets = np.cumsum([0, *map(len, streams)]).astype(np.int32)
    return Segment(np.array(records, np.int32).reshape(-1, WORDS), offsets)
