"""The most likely tokens of a row of raw logits, computed on the host for the few rows that ask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def top_logprobs(logits: NDArray[np.float32], count: int) -> dict[int, float]:
    """Token id -> log-softmax of the `count` largest of `logits` [vocab], most likely first, ties by id."""
    if count == 0:
        return {}
    wide = logits.astype(np.float64)
    highest = float(wide.max())
    log_sum = highest + float(np.log(np.exp(wide - highest).sum()))
    threshold = np.partition(wide, -count)[-count] if count < len(wide) else -np.inf
    candidates = np.flatnonzero(wide >= threshold)
    order = candidates[np.lexsort((candidates, -wide[candidates]))][:count]
    return {int(token): float(wide[token]) - log_sum for token in order}
