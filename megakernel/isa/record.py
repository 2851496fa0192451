"""The format of an instruction record: 32 int32 words.

word 0        number of the phase (bits 0-7); all other bits are 0
words 1-15    operands, in the order that the operation declares
words 16-23   waits: counters whose totals must be reached before the instruction uses its inputs; 0 = none
words 24-31   signals: counters to which the instruction adds after it has stored its results; 0 = none

A wait or signal word names a counter. Its bits are:

0-23          the counter's index + 1
24-27         in signals, the rank whose counter is added to; ALL_RANKS means every rank. OWNER, in indexed signals
              only, means the rank that owns the row block (group of token rows)
28 (NEXT)     the counter is in the next layer's block of counters; each layer has such a block
29 (INDEXED)  the word names the first of several counters, and the step table selects one of them. The operation's
              declaration describes how
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Records = NDArray[np.int32]  # [n, WORDS]
Column = NDArray[np.int32]  # [n]: one operand of n records

WORDS = 32
OPERAND_WORD, OPERANDS = 1, 15
WAIT_WORD, WAITS = 16, 8
SIGNAL_WORD, SIGNALS = 24, 8

MOST_LAYERS = 0xFFF
COUNTER_MASK = 0xFFFFFF
RANK_SHIFT, RANK_MASK = 24, 0xF
ALL_RANKS = 0xF
OWNER = 0xE
NEXT = 1 << 28
INDEXED = 1 << 29


def phase_number(records: Records) -> NDArray[np.int32]:
    """Return the phase number of each record: [n]."""
    return records[..., 0] & 0xFF


def waits(records: Records) -> Records:
    """Return the wait words of records as a view: [..., WAITS]."""
    return records[..., WAIT_WORD : WAIT_WORD + WAITS]


def signals(records: Records) -> Records:
    """Return the signal words of records as a view: [..., SIGNALS]."""
    return records[..., SIGNAL_WORD : SIGNAL_WORD + SIGNALS]


def encode(phase: int, operands: Sequence[int] = (), waits: ArrayLike = (), signals: ArrayLike = ()) -> Records:
    """Return one record, [WORDS], of phase number `phase`. `counter_word` makes elements of `waits` and `signals`."""
    words = np.zeros(WORDS, dtype=np.int32)
    words[0] = phase
    for first, values in ((OPERAND_WORD, operands), (WAIT_WORD, waits), (SIGNAL_WORD, signals)):
        words[first : first + np.size(values)] = values
    return words


def counter_word(counter: int, *, rank: int = 0, next_layer: bool = False, indexed: bool = False) -> int:
    """Return a wait or signal word for the counter with index `counter` in a layer's block of counters."""
    if not 0 <= counter < COUNTER_MASK:
        raise ValueError(f"counter {counter} is not between 0 and {COUNTER_MASK - 1}")
    return (counter + 1) | rank << RANK_SHIFT | (NEXT if next_layer else 0) | (INDEXED if indexed else 0)


def word_counter(words: Records) -> NDArray[np.int32]:
    """Return the counter that each wait or signal word names; -1 for an empty word."""
    return (words & COUNTER_MASK) - 1


def word_rank(words: Records) -> NDArray[np.int32]:
    return (words >> RANK_SHIFT) & RANK_MASK
