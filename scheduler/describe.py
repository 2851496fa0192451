"""A program in figures: what it holds and how tightly its phases are coupled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..isa import BY_NAME, BY_OPCODE
from ..isa.record import INDEXED, SIGNAL_WORD, SIGNALS, WAIT_WORD, WAITS, Records, opcode, word_counter
from ..program import Program


def describe(program: Program) -> dict[str, Any]:
    """Counts of one launch, JSON-ready.

    instructions            all ranks, body unrolled
    by_opcode               the same by instruction name
    per_layer               one layer's by instruction name
    workers, ranks, layers, counters (of all blocks), bytes (of the file)
    all_to_all_per_layer    counters of a layer that every instruction of a phase signals and every instruction of
                            another waits for, more than one each: a barrier between the two
    waits_per_instruction   {number of wait words: instructions}, body unrolled
    """
    layers = program.dims.layers
    segments = ((program.prologue, 1), (program.body, layers), (program.epilogue, 1))
    by_opcode: Counter[str] = Counter()
    waits: Counter[int] = Counter()
    for segment, runs in segments:
        for name, count in _names(segment.records).items():
            by_opcode[name] += count * runs
        words = segment.records[:, WAIT_WORD : WAIT_WORD + WAITS]
        for number, count in zip(*np.unique(np.count_nonzero(words, axis=1), return_counts=True), strict=True):
            waits[int(number)] += int(count) * runs
    return {
        "instructions": program.instructions,
        "by_opcode": dict(by_opcode),
        "per_layer": _names(program.body.records),
        "workers": program.workers,
        "ranks": program.ranks,
        "layers": layers,
        "counters": program.total_counters,
        "bytes": len(program.to_bytes()),
        "all_to_all_per_layer": _all_to_all(program),
        "waits_per_instruction": dict(sorted(waits.items())),
    }


def _names(records: Records) -> dict[str, int]:
    numbers, counts = np.unique(opcode(records), return_counts=True)
    return {BY_OPCODE[int(n)].name: int(c) for n, c in zip(numbers, counts, strict=True)}


def _all_to_all(program: Program) -> int:
    """Counters with a whole phase on both sides. No body counter is both its own and the next layer's."""
    signals = _users(program, SIGNAL_WORD, SIGNALS)
    waits = _users(program, WAIT_WORD, WAITS)
    size = np.bincount(opcode(program.body.records), minlength=len(signals))[:, None]
    whole = (size > 1) & (signals == size), (size > 1) & (waits == size)
    return int((whole[0].any(axis=0) & whole[1].any(axis=0)).sum())


def _users(program: Program, first_word: int, words: int) -> NDArray[np.int64]:
    """[opcode, counter]: body instructions that name the counter. A grid's name counts for each member."""
    records, dims = program.body.records, program.dims
    named = records[:, first_word : first_word + words]
    row, slot = np.nonzero(named)
    word, kind = named[row, slot], opcode(records)[row]
    attention = BY_NAME["attention"]
    out = np.zeros((max(BY_OPCODE) + 1, program.counters), dtype=np.int64)
    plain = word & INDEXED == 0
    np.add.at(out, (kind[plain], word_counter(word[plain])), 1)
    for r, w in zip(row[~plain], word[~plain], strict=True):
        groups = int(attention.columns(records[[r]])["groups"][0]) if first_word == WAIT_WORD else 1
        start = int(word_counter(w))
        out[attention.opcode, start : start + dims.row_blocks * groups] += 1
    return out
