"""From what an engine wants of a step to a valid step table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampleRow:
    """Logits wanted at token `index` of a chunk, and what to do with them. Defaults sample greedily.

    `target` >= 0 scores that token instead of sampling. `store` writes the token to HISTORY at the position
    after the row's.
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


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: a prefill piece or one decode row.

    `slot` is its block-table row and HISTORY slot. A token of -1 means HISTORY[slot][position]. `pages` are the
    sequence's page ids from its start, enough for `start + len(tokens)`.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    samples: Sequence[SampleRow] = ()
