"""Every program that differs from a given one by one small mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megakernel.isa import BY_OPCODE, record
from megakernel.program import Program, Segment

SEGMENTS = ("prologue", "body", "epilogue", "queues")


def edit(program: Program, name: str, row: int, word: int, value: int) -> Program:
    segment: Segment = getattr(program, name)
    records = segment.records.copy()
    records[row, word] = value
    return replace(program, **{name: Segment(records, segment.offsets)})


def swap(program: Program, name: str, row: int, other: int) -> Program:
    segment: Segment = getattr(program, name)
    records = segment.records.copy()
    records[[row, other]] = records[[other, row]]
    return replace(program, **{name: Segment(records, segment.offsets)})


def delete(program: Program, name: str, row: int) -> Program:
    segment: Segment = getattr(program, name)
    offsets = segment.offsets - (segment.offsets > row).astype(np.int32)
    return replace(program, **{name: Segment(np.delete(segment.records, row, axis=0), offsets)})


def _words(program: Program, name: str, row: int) -> Iterator[tuple[str, Program]]:
    words = getattr(program, name).records[row]
    for start, count, what in (
        (record.WAIT_WORD, record.WAITS, "wait"),
        (record.SIGNAL_WORD, record.SIGNALS, "signal"),
    ):
        for word in range(start, start + count):
            old = int(words[word])
            if old == 0:
                continue
            counter = int(record.word_counter(words[word]))
            yield f"drop {what}", edit(program, name, row, word, 0)
            for other in (counter - 1, counter + 1):
                value = (old & ~record.COUNTER_MASK) | (other + 1)
                yield f"{what} {counter} -> {other}", edit(program, name, row, word, value)
            yield f"{what} to the other block", edit(program, name, row, word, old ^ record.NEXT)
            yield f"{what} indexed or not", edit(program, name, row, word, old ^ record.INDEXED)
            ranks = {0, program.ranks - 1, record.ALL_RANKS, record.OWNER} if program.ranks > 1 else set()
            for rank in sorted(ranks - {int(record.word_rank(words[word]))}):
                value = old & ~(record.RANK_MASK << record.RANK_SHIFT) | rank << record.RANK_SHIFT
                yield f"{what} of rank {rank}", edit(program, name, row, word, value)
            free = [w for w in range(start, start + count) if words[w] == 0]
            if what == "signal" and free:
                yield "signal twice", edit(program, name, row, free[0], old)


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """(what was done, program), in a fixed order."""
    for name in SEGMENTS:
        segment: Segment = getattr(program, name)
        for row, words in enumerate(segment.records):
            instruction = BY_OPCODE[int(record.opcode(words))]
            label = f"{name}[{row}] {instruction.name}"
            yield f"{label}: delete", delete(program, name, row)
            if row + 1 not in segment.offsets:
                yield f"{label}: swap with the next", swap(program, name, row, row + 1)
            end = int(segment.offsets[np.searchsorted(segment.offsets, row, side="right")])
            if end - 1 != row:
                yield f"{label}: swap with the stream's last", swap(program, name, row, end - 1)
            for what, mutant in _words(program, name, row):
                yield f"{label}: {what}", mutant
            for i, operand in enumerate(instruction.operands):
                word = record.OPERAND_WORD + i
                for step in (-1, 1, 4):
                    yield f"{label}: {operand} {step:+}", edit(program, name, row, word, int(words[word]) + step)
            layer = int(words[0]) | 1 << record.LAYER_SHIFT
            yield f"{label}: layer field", edit(program, name, row, 0, layer)
    for name in ("totals_first", "totals_middle", "totals_last"):
        totals = getattr(program, name)
        for rank in range(program.ranks):
            for counter in range(program.counters):
                for step in (-1, 1):
                    changed = totals.copy()
                    changed[rank, counter] += step
                    yield f"{name}[{rank}][{counter}] {step:+}", replace(program, **{name: changed})
