"""Finds what a wait waited for. The program tells which phases signal a counter, and the trace tells which instruction
signalled it last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..isa import JOIN, Operation
from ..isa import record as rec
from ..program import Program
from ..trace import IntervalKind
from .resolve import Resolved

_GROUPS = rec.OPERAND_WORD + Operation.ATTENTION.layout.operands.index("groups")

# Counters of block 0, of the middle blocks and of the last block have different producers (see program/program.py).
_FIRST, _MIDDLE, _LAST = range(3)


@dataclass(frozen=True)
class Causes:
    """The causes of waits: for each wait word of each record, the phases that signal the word's counter, as an index
    into `names`. The index is -1 if there is no wait, or if no phase signals the counter.

    `prologue`, `first` (layer 0), `body` (later layers) and `epilogue` are [records, WAITS]. An element of `names`
    lists one or several phases separated by commas. A `join` instruction, which only waits and signals, is replaced by
    the phases that it waits for. A join that waits for nothing counts as a phase itself.
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
    """The counters that the records of a segment may signal. The columns have one entry per possible signal and are
    sorted by record.
    """

    record: NDArray[np.int64]
    rank: NDArray[np.int64]
    counter: NDArray[np.int64]
    ahead: NDArray[np.int64]  # 1 if the counter belongs to the next block, else 0
    maybe: NDArray[np.bool_]  # whether the step table selects one of several counters


def _signals(program: Program, segment: int) -> _Signals:
    """Return all counters that the records of a segment may signal.

    An INDEXED signal may go to the counter of any row block. With OWNER, it goes to the rank that owns that row block.
    A signal to ALL_RANKS goes to each rank.
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
    """Return two arrays [records, WAITS]: the first counter that each wait word may name (-1 if the word is not used),
    and the number of counters that it may name.
    """
    records = program.numbered(segment)[0]
    words = rec.waits(records)
    attention = np.isin(rec.phase_number(records), program.forward.numbers(Operation.ATTENTION))
    groups = np.where(attention, records[:, _GROUPS], 1)
    members = np.where(words & rec.INDEXED, program.dims.row_blocks * groups[:, None], 1)
    return rec.word_counter(words).astype(np.int64), members.astype(np.int64)


def causes(program: Program) -> Causes:
    """Return the causes of all waits of a program. They follow from the records alone: each counter gets the set of the
    phases that signal it, with each join replaced by the phases that the join waits for.
    """
    signals = [_signals(program, s) for s in range(3)]
    waits = [_wait_sets(program, s) for s in range(3)]
    ranks = [program.numbered(s)[1] for s in range(3)]
    # `stands` has a bit set of phases for each record. The set of a join that waits starts empty and grows until no set
    # changes. The set of any other record is the bit of the record's phase.
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
    """Return the bit sets of the phases that signal each counter: [3, rank, counter]. The first index says whether the
    counter's block is the first, a middle one or the last.
    """
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
    """Return the bit set of phases that each wait word waits for: [records, WAITS]."""
    first, members = waits
    result: NDArray[np.int64] = np.where(first >= 0, produced[ranks[:, None], first], 0)
    for r, w in zip(*np.nonzero((first >= 0) & (members > 1)), strict=True):
        begin = first[r, w]
        result[r, w] = np.bitwise_or.reduce(produced[ranks[r], begin : begin + members[r, w]])
    return result


def finishes(resolved: Resolved) -> NDArray[np.int64]:
    """Return, for each executed instruction, the index of its interval that ends last, or -1 if the trace has no
    interval of it. The array has launches x instructions elements.
    """
    order = np.lexsort((resolved.rows["kind"], resolved.end))
    last = np.full(resolved.launches * resolved.program.instructions, -1, dtype=np.int64)
    last[resolved.instance[order]] = order
    return last


def releasers(resolved: Resolved, finish: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each interval that is a wait for counters, the interval whose signal ended the wait. If the wait has
    several counters, this is the last signal of the counter that was satisfied last.

    The result is -1 for other kinds of intervals, and if the trace lacks the instruction that signalled. An INDEXED
    wait word names several counters, of which the step table selects one, and the trace does not contain the step
    table. The result is then the interval of the last instruction that may have signalled before the wait ended.
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
    """Return three arrays with one entry per signal, sorted by counter and then by time: the key of the counter, the
    interval at whose end the signal was sent, and whether the signal may belong to another counter.
    """
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
