"""Finds the most likely tokens of a row of logits, on the host, for the few rows whose request asks for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64


def top_logprobs(logits: NDArray[np.float32], count: int, token: int, logprob: float) -> dict[int, float]:
    """Return the `count` most likely tokens of `logits` [vocab] as {id: log-softmax}, most likely first, ties by id.

    `logprob` is the known log-softmax of `token`. The log-sum-exp of the row is logits[token] - logprob.
    """
    if count == 0:
        return {}
    whole = len(logits) // _BLOCK * _BLOCK
    # To sort only a few logits, take the maximum of each block of _BLOCK logits. The `count` largest maxima are logits
    # themselves, so a logit that is smaller than all of them is not among the `count` largest logits.
    highest = np.append(logits[:whole].reshape(-1, _BLOCK).max(axis=1), logits[whole:])
    least = np.partition(highest, -count)[-count] if count < len(highest) else -np.inf
    candidates = np.flatnonzero(logits >= least)
    order = candidates[np.lexsort((candidates, -logits[candidates]))][:count]
    log_sum = float(logits[token]) - logprob
    return {int(i): float(logits[i]) - log_sum for i in order}
