"""Segments, the parts of a program, and the streams of records in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa.record import Records

SEGMENTS = ("prologue", "body", "epilogue")


@dataclass(frozen=True)
class Segment:
    """The records of all ranks' workers, one stream after another. The stream of a worker is
    records[offsets[s]:offsets[s+1]], where s = rank * workers per rank + worker.
    """

    records: Records
    offsets: NDArray[np.int32]

    def stream(self, index: int) -> Records:
        return self.records[self.offsets[index] : self.offsets[index + 1]]
