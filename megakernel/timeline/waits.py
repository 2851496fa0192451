"""Finds which counters a program's instructions wait for and signal, and which phases can therefore end a wait. Arrays
over records contain the records of all segments, one segment after another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import JOIN, Operation
from ..isa import record as rec
from ..isa.record import Records
from ..program import Program
from ..program.part import Signals
from .spans import Ints

_GROUPS = rec.OPERAND_WORD + Operation.ATTENTION.layout.operands.index("groups")


@dataclass(frozen=True)
class Waits:
    """What each record (instruction) waits for. The arrays have the shape [records, WAITS], because a record has WAITS
    words, each naming one counter or a range of counters of its layer's block. `first` is the first counter (-1 for an
    unused word), and `members` the number of counters."""

    first: Ints
    members: Ints

    @staticmethod
    def of(program: Program, records: Records) -> Waits:
        words = rec.waits(records)
        attention = np.isin(rec.phase_number(records), program.forward.numbers(Operation.ATTENTION))
        groups = np.where(attention, records[:, _GROUPS], 1)
        members = np.where(words & rec.INDEXED, program.dims.bucket.row_blocks * groups[:, None], 1).astype(np.int64)
        return Waits(rec.word_counter(words).astype(np.int64), members)


@dataclass(frozen=True)
class Causes:
    """For each wait of a record, the phases whose signals can end it. `first` and `later` [records, WAITS] are indices
    into `names`, for layer 0 and for all other layers; -1 means no phase. A name lists phases, separated by commas. A
    `join` only passes signals on, so the phases that the join waits for are listed."""

    names: list[str]
    first: NDArray[np.int16]
    later: NDArray[np.int16]


# Each layer has a block of counters. Different segments signal the first block, the middle ones and the last one.
_FIRST, _MIDDLE, _LAST = range(3)


def causes(program: Program) -> Causes:
    """Return which phases can end each wait of a program. Inside, a set of phases is an integer: bit n is phase n."""
    records, segment, ranks = program.every
    waits, signals = Waits.of(program, records), Signals.of(program, records)
    ahead, signalling = signals.ahead == 1, segment[signals.record]
    # The prologue signals block 0, the epilogue the last block, and a layer its own block or the next.
    into = ((signalling < 2) & ~ahead, signalling == 1, (signalling == 2) | ahead)

    def waited(block: Ints, stands: Ints) -> Ints:
        """Return the set of phases that can end each wait, [records, WAITS]. `block` has the number of each record's
        block of counters. `stands` has the set of phases that each record's signals are attributed to."""
        sets = np.zeros((3, program.ranks, program.counters), dtype=np.int64)
        for signalled, some in zip(sets, into, strict=True):
            np.bitwise_or.at(signalled, (signals.rank[some], signals.counter[some]), stands[signals.record[some]])
        used = waits.first >= 0
        found: Ints = np.where(used, sets[block[:, None], ranks[:, None], waits.first], 0)
        for r, w in zip(*np.nonzero(used & (waits.members > 1)), strict=True):
            counters = slice(waits.first[r, w], waits.first[r, w] + waits.members[r, w])
            found[r, w] = np.bitwise_or.reduce(sets[block[r], ranks[r], counters])
        return found

    # A wait is attributed to the phase that sends the awaited signal. But a join only passes signals on. So a wait for
    # a join is attributed to the phases that the join itself waits for, perhaps through other joins. Therefore the sets
    # of phases for joins begin empty, and grow until none changes.
    number = rec.phase_number(records)
    phase, relays = np.int64(1) << number.astype(np.int64), (number == JOIN.number) & (waits.first >= 0).any(axis=1)
    in_layer_0, in_later = (np.array(blocks)[segment] for blocks in ((_FIRST, _FIRST, _LAST), (_FIRST, _MIDDLE, _LAST)))
    stands = np.where(relays, 0, phase)
    while True:
        first, later = waited(in_layer_0, stands), waited(in_later, stands)
        grown = np.where(relays, np.bitwise_or.reduce(first | later, axis=1), phase)
        if (grown == stands).all():
            break
        stands = grown
    sets = np.unique(np.concatenate([first, later]))
    sets = sets[sets != 0]
    phases = program.forward.by_number
    names = [", ".join(p.name for n, p in phases.items() if mask >> n & 1) for mask in sets.tolist()]
    return Causes(names, *(np.where(w == 0, -1, np.searchsorted(sets, w)).astype(np.int16) for w in (first, later)))
