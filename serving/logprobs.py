"""The most likely tokens of a row of raw logits, found on the host for the few rows that ask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64


def top_logprobs(logits: NDArray[np.float32], count: int, token: int, logprob: float) -> dict[int, float]:
    """Token id -> log-softmax of the `count` largest of `logits` [vocab], most likely first, ties by id.

    `logprob` is that of `token`, from which the normaliser follows.
    """
    if count == 0:
        return {}
    whole = len(logits) // _BLOCK * _BLOCK
    # The count largest maxima of blocks are count logits: no smaller one can be among the largest of all.
    highest = np.append(logits[:whole].reshape(-1, _BLOCK).max(axis=1), logits[whole:])
    least = np.partition(highest, -count)[-count] if count < len(highest) else -np.inf
    candidates = np.flatnonzero(logits >= least)
    order = candidates[np.lexsort((candidates, -logits[candidates]))][:count]
    log_sum = float(logits[token]) - logprob
    return {int(i): float(logits[i]) - log_sum for i in order}
