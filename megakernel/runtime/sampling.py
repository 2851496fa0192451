"""How logit rows are sampled: the parameters of one row, or of many rows as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger[Any]]

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTS = ("prompt_length", "top_k", "choice")
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SampleRow:
    """Requests logits at token `index` of a chunk and says how to use them. The defaults sample greedily.

    If `target` >= 0, the row returns the log-probability of that token instead of sampling. If `store` is true, the
    sampled token is written to HISTORY as the sequence's next token. If the row has penalties, it reads the earlier
    tokens of its sequence from HISTORY. The same step must not store any of those tokens.
    """

    index: int
    prompt_length: int = 0
    target: int = -1
    store: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def penalised(self) -> bool:
        """Whether penalties make the choice of a token depend on the tokens in HISTORY."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class Sampling:
    """The sampling parameters of many rows, as arrays. A row has the same index (`place`) in all arrays. The last place
    has the defaults, which padding rows use.

    The keys of `columns` are names of step-table fields.
    """

    def __init__(self, places: int) -> None:
        self.columns: dict[str, NDArray[Any]] = {
            **{name: np.zeros(places, np.int32) for name in (*_INTS, "seed_low", "seed_high")},
            **{name: np.full(places, getattr(SampleRow, name), np.float32) for name in FLOATS},
        }
        self.penalised = np.zeros(places, np.bool_)
        self.bias_count = np.zeros(places, np.int32)
        self.bias_ids: NDArray[np.int32] = np.zeros((places, 0), np.int32)
        self.bias_values: NDArray[np.float32] = np.zeros((places, 0), np.float32)

    def set(self, place: int, row: SampleRow) -> None:
        """Set `place` to sample like `row`."""
        for name in (*_INTS, *FLOATS):
            self.columns[name][place] = getattr(row, name)
        low, high = np.array([row.seed & _WORD, row.seed >> 32 & _WORD], np.uint32).view(np.int32)
        self.columns["seed_low"][place], self.columns["seed_high"][place] = low, high
        self.penalised[place] = row.penalised
        pairs = len(row.bias)
        if (more := pairs - self.bias_ids.shape[1]) > 0:
            wider = ((0, 0), (0, more))
            self.bias_ids, self.bias_values = np.pad(self.bias_ids, wider), np.pad(self.bias_values, wider)
        self.bias_count[place] = pairs
        if pairs:
            self.bias_ids[place, :pairs], self.bias_values[place, :pairs] = list(row.bias), list(row.bias.values())
