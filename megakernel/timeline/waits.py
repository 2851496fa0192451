"""Finds what a wait waited for: the program tells which phases signal a counter, the trace which instruction
came last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import JOIN, OPERATIONS, Operation
from ..isa import record as rec
from ..program import Program
from ..trace import IntervalKind
from .resolve import Resolved

_GROUPS = rec.OPERAND_WORD + OPERATIONS[Operation.ATTENTION].operands.index("groups")

# Counters of block 0, of the middle blocks and of the last block have different producers (see program/program.py).
_FIRST, _MIDDLE, _LAST = range(3)


@dataclass(frozen=True)
class Causes:
    """For each wait word, the phases that signal its counter, as an index into `names`; -1 if there is no wait.

    `prologue`, `first` (layer 0), `body` (later layers) and `epilogue` are [records, WAITS]. A name lists several
    phases separated by commas. A join is replaced by what it waits for, or counts itself if it waits for nothing.
    """

    names: list[str]
    prologue: NDArray[np.int16]
    first: NDArray[np.int16]
    body: NDArray[np.int16]
    epilogue: NDArray[np.int16]

    def table(self, segment: int, block: int) -> NDArray[np.int16]:
        return (self.prologue, self.body if block else self.first, self.epilogue)[segment]


@dataclass(frozen=True)
class _Signals:
    """Every counter that a segment's records may signal, sorted by record."""

    record: NDArray[np.int64]
    rank: NDArray[np.int64]
    counter: NDArray[np.int64]
    ahead: NDArray[np.int64]  # 1: a counter of the next block
    maybe: NDArray[np.bool_]  # the step table selects one of several counters


def _signals(program: Program, segment: int) -> _Signals:
    """An INDEXED signal may go to any row block's counter, and with OWNER, to the rank that owns this row block. A
    signal to ALL_RANKS goes to each rank.
    """
    records = program.numbered(segment)[0]
    words = rec.signals(records)
    record, slot = np.nonzero(words)
    word = words[record, slot]
    copies = np.where(word & rec.INDEXED, program.dims.row_blocks, 1)
    everyone = rec.word_rank(word) == rec.ALL_RANKS
    ranks = np.where(everyone, program.ranks, 1)
    at = np.repeat(np.arange(len(word)), copies * ranks)
    nth = np.arange(len(at)) - np.repeat(np.cumsum(copies * ranks) - copies * ranks, copies * ranks)
    rank = np.where(everyone[at], nth // copies[at], rec.word_rank(word)[at])
    rank = np.where(rank == rec.OWNER, nth % program.ranks, rank)
    counter = rec.word_counter(word)[at].astype(np.int64) + nth % copies[at]
    return _Signals(
        record[at], rank.astype(np.int64), counter, (word[at] & rec.NEXT != 0).astype(np.int64), copies[at] > 1
    )


def _wait_sets(program: Program, segment: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first counter of each wait word (-1: none) and the number of counters it may name: [records, WAITS] each."""
    records = program.numbered(segment)[0]
    words = rec.waits(records)
    attention = np.isin(rec.phase_number(records), program.forward.numbers(Operation.ATTENTION))
    groups = np.where(attention, records[:, _GROUPS], 1)
    members = np.where(words & rec.INDEXED, program.dims.row_blocks * groups[:, None], 1)
    return rec.word_counter(words).astype(np.int64), members.astype(np.int64)


def causes(program: Program) -> Causes:
    """Derive the causes from the records alone: bit sets of phases per counter, with joins replaced by what
    they wait for.
    """
    signals = [_signals(program, s) for s in range(3)]
    waits = [_wait_sets(program, s) for s in range(3)]
    ranks = [program.numbered(s)[1] for s in range(3)]
    # Each record has a bit set of phases. That of a join which waits starts empty and grows until
    # no set changes; any other set is the bit of the record's phase.
    numbers = [rec.phase_number(program.numbered(s)[0]) for s in range(3)]
    waiting = [(n == JOIN.number) & (w[0] >= 0).any(axis=1) for n, w in zip(numbers, waits, strict=True)]
    stands = [np.where(w, 0, np.int64(1) << n.astype(np.int64)) for n, w in zip(numbers, waiting, strict=True)]
    while True:
        produced = _produced(program, signals, stands)
        found = [
            _waited(waits[0], ranks[0], produced[_FIRST]),
            _waited(waits[1], ranks[1], produced[_FIRST]),
            _waited(waits[1], ranks[1], produced[_MIDDLE]),
            _waited(waits[2], ranks[2], produced[_LAST]),
        ]
        own = [found[0], found[1] | found[2], found[3]]
        grown = [np.where(w, np.bitwise_or.reduce(o, axis=1), s) for w, o, s in zip(waiting, own, stands, strict=True)]
        if all((g == s).all() for g, s in zip(grown, stands, strict=True)):
            break
        stands = grown
    sets = np.unique(np.concatenate([f.ravel() for f in found]))
    sets = sets[sets != 0]
    phases = program.forward.by_number
    names = [", ".join(p.name for number, p in phases.items() if mask >> number & 1) for mask in sets.tolist()]
    tables = [np.where(f == 0, -1, np.searchsorted(sets, f)).astype(np.int16) for f in found]
    return Causes(names, *tables)


def _produced(program: Program, signals: list[_Signals], stands: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Bit sets of the phases that signal each counter: [first/middle/last block, rank, counter]."""
    sets = np.zeros((3, program.ranks, program.counters), dtype=np.int64)
    for segment, blocks in ((0, (_FIRST,)), (1, (_FIRST, _MIDDLE)), (2, (_LAST,))):
        s = signals[segment]
        plain = s.ahead == 0
        for block in blocks:
            np.bitwise_or.at(sets[block], (s.rank[plain], s.counter[plain]), stands[segment][s.record[plain]])
    s, ahead = signals[1], signals[1].ahead == 1
    for block in (_MIDDLE, _LAST):
        np.bitwise_or.at(sets[block], (s.rank[ahead], s.counter[ahead]), stands[1][s.record[ahead]])
    return sets


def _waited(
    waits: tuple[NDArray[np.int64], NDArray[np.int64]], ranks: NDArray[np.int64], produced: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The set of phases for each wait word: [records, WAITS]."""
    first, members = waits
    result: NDArray[np.int64] = np.where(first >= 0, produced[ranks[:, None], first], 0)
    for r, w in zip(*np.nonzero((first >= 0) & (members > 1)), strict=True):
        begin = first[r, w]
        result[r, w] = np.bitwise_or.reduce(produced[ranks[r], begin : begin + members[r, w]])
    return result


def finishes(resolved: Resolved) -> NDArray[np.int64]:
    """For each executed instruction, its interval that ends last; -1 if the trace has none. [launches x
    instructions]
    """
    order = np.lexsort((resolved.rows["kind"], resolved.end))
    last = np.full(resolved.launches * resolved.program.instructions, -1, dtype=np.int64)
    last[resolved.instance[order]] = order
    return last


def releasers(resolved: Resolved, finish: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each counter wait, the interval whose end released it: the last arrival at the counter that was satisfied
    last.

    -1 for other kinds, and if the trace lacks the producer. An INDEXED word names counters that the step table selects,
    which the trace does not contain; the releaser is then the last possible arrival before the wait ended.
    """
    program = resolved.program
    key, interval, maybe = _arrivals(resolved, finish)
    end = resolved.end[interval]
    doubts = np.concatenate([[0], np.cumsum(maybe)])
    result = np.full(len(resolved), -1, dtype=np.int64)
    header = resolved.trace.header
    slack = int(np.ceil((header.clock_error_s + 2 * header.read_s) / header.tick_s))
    for segment in range(3):
        first, members = _wait_sets(program, segment)
        wait = np.flatnonzero(resolved.kind(IntervalKind.COUNTER_WAIT) & (resolved.segment == segment))
        index, slot = resolved.rows["instruction"][wait], resolved.rows["slot"][wait] % rec.WAITS
        some = first[index, slot] >= 0
        wait, index, slot = wait[some], index[some], slot[some]
        ahead = program.numbered(segment)[0][index, rec.WAIT_WORD + slot] & rec.NEXT != 0
        rank = resolved.rows["rank"][wait].astype(np.int64)
        base = _key(program, resolved.launch[wait], rank, resolved.block[wait] + ahead, first[index, slot])
        size = members[index, slot]
        low = np.searchsorted(key, base, side="left")
        high = np.searchsorted(key, base + size - 1, side="right")
        certain = (size == 1) & (doubts[high] == doubts[low])
        last = certain & (high > low)
        result[wait[last]] = interval[high[last] - 1]
        for w, a, b in zip(wait[~certain], low[~certain], high[~certain], strict=True):
            before = a + np.flatnonzero(end[a:b] <= resolved.end[w] + slack)
            if len(before):
                result[w] = interval[before[np.argmax(end[before])]]
    return result


def _key(
    program: Program,
    launch: NDArray[np.int64],
    rank: NDArray[np.int64],
    block: NDArray[np.int64],
    counter: NDArray[np.int64],
) -> NDArray[np.int64]:
    return ((launch * program.ranks + rank) * (program.dims.layers + 1) + block) * program.counters + counter


_Arrivals = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]


def _arrivals(resolved: Resolved, finish: NDArray[np.int64]) -> _Arrivals:
    """(counter key, arriving interval, whether it may belong to another counter), sorted by key and then by time."""
    done = finish[finish >= 0]
    parts = zip(*(_segment_arrivals(resolved, done, segment) for segment in range(3)), strict=True)
    key, interval, maybe = (np.concatenate(part) for part in parts)
    order = np.lexsort((resolved.end[interval], key))
    return key[order], interval[order], maybe[order]


def _segment_arrivals(resolved: Resolved, done: NDArray[np.int64], segment: int) -> _Arrivals:
    program = resolved.program
    s = _signals(program, segment)
    here = done[resolved.segment[done] == segment]
    record = resolved.rows["instruction"][here].astype(np.int64)
    begin = np.searchsorted(s.record, record, side="left")
    count = np.searchsorted(s.record, record, side="right") - begin
    at = np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(count.sum())
    interval = np.repeat(here, count)
    key = _key(program, resolved.launch[interval], s.rank[at], resolved.block[interval] + s.ahead[at], s.counter[at])
    return key, interval, s.maybe[at]
