"""A program as text: one line per instruction, stream by stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..isa import BY_OPCODE, Dtype
from ..isa.record import (
    ALL_RANKS,
    INDEXED,
    NEXT,
    OPERAND_WORD,
    SIGNAL_WORD,
    SIGNALS,
    WAIT_WORD,
    WAITS,
    Records,
    opcode,
    word_counter,
    word_rank,
)
from ..program import Program, Segment


def disassemble(program: Program) -> Iterator[str]:
    """Lines without line ends; the same program always gives the same text.

    `#7=3` waits until counter 7 has its 3 arrivals of this launch; `#7=3 (1 in layer 0)` where the prologue
    feeds it. `#7+` signals counter 7 of the next layer's block. `#7[table]` is a grid that starts at counter 7,
    whose member the step table picks.
    """
    d = program.dims
    yield (
        f"program {program.hash}: {program.machine}, ranks {program.ranks}, workers {program.workers}, "
        f"{Dtype(d.dtype).name.lower()}, tokens {d.tokens}, logit rows {d.logit_rows}, layers {d.layers}"
    )
    yield f"{program.instructions} instructions, {program.counters} counters in each of {d.layers + 1} blocks"
    first, middle, last = program.totals_first[0], program.totals_middle[0], program.totals_last[0]
    body = (first, first if d.layers == 1 else middle)
    yield from _segment("prologue", program, program.prologue, (first, first))
    yield from _segment(f"body, layers 0 to {d.layers - 1}", program, program.body, body)
    yield from _segment("epilogue", program, program.epilogue, (last, last))


Totals = tuple[NDArray[np.int32], NDArray[np.int32]]


def _segment(title: str, program: Program, segment: Segment, totals: Totals) -> Iterator[str]:
    yield f"{title}:"
    for stream in range(program.ranks * program.workers):
        rank, worker = divmod(stream, program.workers)
        yield f"  rank {rank} worker {worker}:"
        records = segment.stream(stream)
        if len(records):
            yield from _lines(records, int(segment.offsets[stream]), totals)


def _lines(records: Records, start: int, totals: Totals) -> Iterator[str]:
    opcodes = opcode(records)
    for i, record in enumerate(records):
        instruction = BY_OPCODE[int(opcodes[i])]
        operands = record[OPERAND_WORD : OPERAND_WORD + len(instruction.operands)].tolist()
        text = [f"    {start + i:6d}  {instruction.name:<12}"]
        text += [f"{name}={value}" for name, value in zip(instruction.operands, operands, strict=True)]
        waits, signals = record[WAIT_WORD : WAIT_WORD + WAITS], record[SIGNAL_WORD : SIGNAL_WORD + SIGNALS]
        text += ["wait", *(_wait(word, totals) for word in waits[waits != 0].reshape(-1, 1))] if waits.any() else []
        text += ["signal", *(_signal(word) for word in signals[signals != 0].reshape(-1, 1))] if signals.any() else []
        yield " ".join(text)


def _wait(word: Records, totals: Totals) -> str:
    counter = int(word_counter(word)[0])
    if word & INDEXED:
        return f"#{counter}[table]"
    first, later = (int(t[counter]) for t in totals)
    return f"#{counter}={later}" + (f" ({first} in layer 0)" if first != later else "")


def _signal(word: Records) -> str:
    rank = int(word_rank(word)[0])
    to = "@all" if rank == ALL_RANKS else f"@{rank}" if rank else ""
    return f"#{word_counter(word)[0]}{'[table]' if word & INDEXED else ''}{'+' if word & NEXT else ''}{to}"
