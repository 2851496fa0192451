"""Finds instructions that took far longer than others of their phase, for example because the system
interrupted them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import MAX_PHASES
from ..trace import IntervalKind
from .resolve import Resolved

FAR = 8  # an outlier takes more than this many times the median of its phase


@dataclass(frozen=True)
class Outliers:
    """The COMPUTE intervals of a trace that are much longer than usual.

    `median` has, for each phase number, the median length of the phase's COMPUTE intervals in ticks (0 if there are
    none). `chosen` is a mask of the COMPUTE intervals that are longer than FAR * median.
    """

    median: NDArray[np.float64]
    chosen: NDArray[np.bool_]

    def beyond(self, resolved: Resolved) -> NDArray[np.float64]:
        """Return the length of each interval minus the median length of its phase, in ticks."""
        ticks: NDArray[np.float64] = resolved.end - resolved.begin - self.median[resolved.number]
        return ticks


def outliers(resolved: Resolved) -> Outliers:
    compute = np.flatnonzero(resolved.kind(IntervalKind.COMPUTE))
    length, number = (resolved.end - resolved.begin)[compute], resolved.number[compute]
    median = np.zeros(MAX_PHASES + 1)
    for one in np.unique(number):
        median[one] = np.median(length[number == one])
    chosen = np.zeros(len(resolved), dtype=bool)
    chosen[compute] = (length > FAR * median[number]) & (median[number] > 0)
    return Outliers(median, chosen)
