"""Every program that differs from a given one by one small mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megakernel.isa import BY_OPCODE, record
from megakernel.program import Program, Segment

SEGMENTS = ("prologue", "body", "epilogue")


def _edit(program: Program, name: str, row: int, word: int, value: int) -> Program:
    segment: Segment = getattr(program, name)
    records = segment.records.copy()
    records[row, word] = value
    return replace(program, **{name: Segment(records, segment.offsets)})


def _swap(program: Program, name: str, row: int) -> Program:
    segment: Segment = getattr(program, name)
    records = segment.records.copy()
    records[[row, row + 1]] = records[[row + 1, row]]
    return replace(program, **{name: Segment(records, segment.offsets)})


def _delete(program: Program, name: str, row: int) -> Program:
    segment: Segment = getattr(program, name)
    offsets = segment.offsets - (segment.offsets > row).astype(np.int32)
    return replace(program, **{name: Segment(np.delete(segment.records, row, axis=0), offsets)})


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """(what was done, program), in a fixed order."""
    for name in SEGMENTS:
        segment: Segment = getattr(program, name)
        for row, words in enumerate(segment.records):
            instruction = BY_OPCODE[int(record.opcode(words))]
            label = f"{name}[{row}] {instruction.name}"
            yield f"{label}: delete", _delete(program, name, row)
            if row + 1 not in segment.offsets:
                yield f"{label}: swap with the next", _swap(program, name, row)
            for start, count, what in (
                (record.WAIT_WORD, record.WAITS, "wait"),
                (record.SIGNAL_WORD, record.SIGNALS, "signal"),
            ):
                for word in range(start, start + count):
                    old = int(words[word])
                    if old == 0:
                        continue
                    counter = int(record.word_counter(words[word]))
                    yield f"{label}: drop {what}", _edit(program, name, row, word, 0)
                    for other in (counter - 1, counter + 1):
                        value = (old & ~record.COUNTER_MASK) | (other + 1)
                        yield f"{label}: {what} {counter} -> {other}", _edit(program, name, row, word, value)
                    yield f"{label}: {what} to the other block", _edit(program, name, row, word, old ^ record.NEXT)
                    yield f"{label}: {what} indexed or not", _edit(program, name, row, word, old ^ record.INDEXED)
                    free = [w for w in range(start, start + count) if words[w] == 0]
                    if what == "signal" and free:
                        yield f"{label}: signal twice", _edit(program, name, row, free[0], old)
            for i, operand in enumerate(instruction.operands):
                word = record.OPERAND_WORD + i
                for step in (-1, 1, 4):
                    yield f"{label}: {operand} {step:+}", _edit(program, name, row, word, int(words[word]) + step)
            yield f"{label}: layer field", _edit(program, name, row, 0, int(words[0]) | 1 << record.LAYER_SHIFT)
    for name in ("totals_first", "totals_middle", "totals_last"):
        totals = getattr(program, name)
        for counter in range(program.counters):
            for step in (-1, 1):
                changed = totals.copy()
                changed[0, counter] += step
                yield f"{name}[{counter}] {step:+}", replace(program, **{name: changed})
