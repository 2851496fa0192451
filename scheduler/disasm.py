"""Prints a program as text. Each instruction gets one line, and the instructions of each worker form one stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dtype, Forward
from megakernel.isa import record as rec
from megakernel.program import Program, Segment, check

# The number of arrivals that each counter gets in layer 0, and in each later layer: two arrays [ranks, counters].
Totals = tuple[NDArray[np.int32], NDArray[np.int32]]


def disassemble(program: Program) -> Iterator[str]:
    """Yield the lines of the listing, without line ends. The same program always gives the same text.

    Instructions signal counters and wait for them. `#7=3` waits until counter 7 has received its 3 arrivals in this
    launch; a signal of attention adds one for each row and KV head. `#7=3 (1 in layer 0)` means that only one arrival
    is needed in layer 0, where the prologue signals the counter. `#7+` signals counter 7 of the next layer. `#7@3`
    signals counter 7 on rank 3, `#7@all` on every rank, and `#7@owner` on the rank that stores the rows. `#7[table]` is
    a grid of counters that starts at counter 7; the inputs of a step, the step table, select one of them."""
    check(program)
    d = program.dims
    classes = f"{', KV in q8_0' * d.model.quantised_kv}{', activations in q8' * d.model.q8_activations}"
    yield (
        f"program {program.hash}: {program.machine}, ranks {program.ranks}, workers {program.workers}, "
        f"{Dtype(d.model.dtype).name.lower()}{classes}, "
        f"tokens {d.bucket.tokens}, logit rows {d.bucket.logit_rows}, layers {d.model.layers}"
    )
    yield f"{program.instructions} instructions, {program.counters} counters in each of {d.model.layers + 1} blocks"
    first, middle, last = program.totals_first, program.totals_middle, program.totals_last
    body = (first, first if d.model.layers == 1 else middle)
    streams, queues = ("worker", program.workers), ("queue", program.rank_queues)
    yield from _segment("prologue", program.prologue, streams, (first, first), program.forward)
    yield from _segment(f"body, layers 0 to {d.model.layers - 1}", program.body, streams, body, program.forward)
    yield from _segment("queues of the body", program.queues, queues, body, program.forward, len(program.body.records))
    yield from _segment("epilogue", program.epilogue, streams, (last, last), program.forward)


def _segment(
    title: str, segment: Segment, of: tuple[str, int], totals: Totals, forward: Forward, start: int = 0
) -> Iterator[str]:
    """Yield the lines for one segment (prologue, layer or epilogue) of all workers' streams, or for all queues. `of` is
    ("worker", workers per rank), or for queues ("queue", queues per rank)."""
    name, each = of
    if each:
        yield f"{title}:"
    for stream in range(len(segment.offsets) - 1):
        rank, number = divmod(stream, each)
        yield f"  rank {rank} {name} {number}:"
        for i, record in enumerate(segment.stream(stream), start + int(segment.offsets[stream])):
            phase = forward.of_record(record)
            operands = record[rec.OPERAND_WORD : rec.OPERAND_WORD + len(phase.operands)].tolist()
            text = [f"    {i:6d}  {phase.name:<12}"]
            text += [f"{operand}={value}" for operand, value in zip(phase.operands, operands, strict=True)]
            waits, signals = (words[words != 0].reshape(-1, 1) for words in (rec.waits(record), rec.signals(record)))
            text += ["wait", *(_wait(word, rank, totals) for word in waits)] if len(waits) else []
            text += ["signal", *(_signal(word, rank) for word in signals)] if len(signals) else []
            yield " ".join(text)


def _wait(word: rec.Records, rank: int, totals: Totals) -> str:
    counter = int(rec.word_counter(word)[0])
    if word & rec.INDEXED:
        return f"#{counter}[table]"
    first, later = (int(t[rank, counter]) for t in totals)
    return f"#{counter}={later}" + (f" ({first} in layer 0)" if first != later else "")


def _signal(word: rec.Records, own: int) -> str:
    rank = int(rec.word_rank(word)[0])
    to = {own: "", rec.ALL_RANKS: "@all", rec.OWNER: "@owner"}.get(rank, f"@{rank}")
    return f"#{rec.word_counter(word)[0]}{'[table]' if word & rec.INDEXED else ''}{'+' if word & rec.NEXT else ''}{to}"
