"""A program in figures: what it holds and how tightly its phases are coupled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..isa import BY_NAME, BY_OPCODE, Dims, link_bytes
from ..isa import record as rec
from ..isa.record import Records
from ..program import Program, Segment


def describe(program: Program) -> dict[str, Any]:
    """Counts of one launch, JSON-ready.

    instructions            all ranks, body unrolled
    by_opcode               the same by instruction name
    per_layer               one layer's by instruction name
    workers, ranks, layers, counters (of all blocks), bytes (of the file)
    all_to_all_per_layer    counters of a layer that every instruction of a phase signals and every instruction of
                            another waits for, more than one each: a barrier between the two
    waits_per_instruction   {number of wait words: instructions}, body unrolled
    matmul                  dots or tensor; None for a CPU
    lowering                how the O projection and the residual stream are shared; None for one rank
    link_bytes_per_layer    [from rank][to rank]: bytes that a layer's instructions store at other ranks
    link_bytes              of one launch, declared stores of all ranks
    """
    dims, layers = program.dims, program.dims.layers
    segments = ((program.prologue, 1), (program.body, layers), (program.queues, layers), (program.epilogue, 1))
    layer = _link(program, (program.body, program.queues))
    ends = _link(program, (program.prologue,)) + _link(program, (program.epilogue,))
    by_opcode: Counter[str] = Counter()
    waits: Counter[int] = Counter()
    for segment, runs in segments:
        for name, count in _names(segment.records).items():
            by_opcode[name] += count * runs
        used = np.count_nonzero(rec.waits(segment.records), axis=1)
        for number, count in zip(*np.unique(used, return_counts=True), strict=True):
            waits[int(number)] += int(count) * runs
    return {
        "instructions": program.instructions,
        "by_opcode": dict(by_opcode),
        "per_layer": _names(np.concatenate([program.body.records, program.queues.records])),
        "workers": program.workers,
        "ranks": program.ranks,
        "layers": layers,
        "counters": program.total_counters,
        "bytes": len(program.to_bytes()),
        "all_to_all_per_layer": _all_to_all(program),
        "waits_per_instruction": dict(sorted(waits.items())),
        "matmul": ("dots" if dims.dots else "tensor") if dims.pages else None,
        "lowering": None if dims.tp == 1 else _lowering(dims),
        "link_bytes_per_layer": layer.tolist(),
        "link_bytes": int(layers * layer.sum() + ends.sum()),
    }


def _lowering(dims: Dims) -> dict[str, str]:
    return {
        "o": "replicated" if dims.replicated_o else "sharded",
        "residual": "replicated" if dims.one_hop else "dealt",
    }


def _link(program: Program, segments: Sequence[Segment]) -> NDArray[np.int64]:
    """[from rank, to rank] bytes of one run of these segments."""
    out = np.zeros((program.ranks, program.ranks), dtype=np.int64)
    for rank in range(program.ranks):
        records = _of_rank(program, segments, rank)
        for number in np.unique(rec.opcode(records)):
            instruction = BY_OPCODE[int(number)]
            columns = instruction.columns(records[rec.opcode(records) == number])
            out[rank] += link_bytes(instruction, columns, program.rank_dims(rank))
    return out


def _of_rank(program: Program, segments: Sequence[Segment], rank: int) -> Records:
    parts = []
    for segment in segments:
        first, end = (segment.offsets[(len(segment.offsets) - 1) // program.ranks * r] for r in (rank, rank + 1))
        parts.append(segment.records[first:end])
    return np.concatenate(parts)


def _names(records: Records) -> dict[str, int]:
    numbers, counts = np.unique(rec.opcode(records), return_counts=True)
    return {BY_OPCODE[int(n)].name: int(c) for n, c in zip(numbers, counts, strict=True)}


def _all_to_all(program: Program) -> int:
    """Counters with a whole phase on both sides, on the rank that has most. Signals may be of all ranks.

    No body counter is both its own and the next layer's.
    """
    body = (program.body, program.queues)
    ranks = [_of_rank(program, body, rank) for rank in range(program.ranks)]
    sizes = [np.bincount(rec.opcode(records), minlength=max(BY_OPCODE) + 1)[:, None] for records in ranks]
    size, most = np.sum(sizes, axis=0), 0
    for rank, (records, own) in enumerate(zip(ranks, sizes, strict=True)):
        signals = np.sum([_users(program, r, rec.signals(r), to=rank) for r in ranks], axis=0)
        waits = _users(program, records, rec.waits(records))
        whole = (size > 1) & (signals == size), (own > 1) & (waits == own)
        most = max(most, int((whole[0].any(axis=0) & whole[1].any(axis=0)).sum()))
    return most


def _users(program: Program, records: Records, named: Records, to: int | None = None) -> NDArray[np.int64]:
    """[opcode, counter]: instructions whose words `named` name a rank's counter. A grid's name counts for each member.

    `to`: whose counters, where the words say so.
    """
    dims = program.dims
    used = named != 0
    if to is not None:
        used &= np.isin(rec.word_rank(named), (to, rec.OWNER, rec.ALL_RANKS))
    row, slot = np.nonzero(used)
    word, kind = named[row, slot], rec.opcode(records)[row]
    attention = BY_NAME["attention"]
    out = np.zeros((max(BY_OPCODE) + 1, program.counters), dtype=np.int64)
    plain = word & rec.INDEXED == 0
    np.add.at(out, (kind[plain], rec.word_counter(word[plain])), 1)
    for r, w in zip(row[~plain], word[~plain], strict=True):
        groups = int(attention.columns(records[[r]])["groups"][0]) if to is None else 1
        members = np.arange(dims.row_blocks * groups)
        if to is not None and rec.word_rank(w) == rec.OWNER:
            members = members[members % dims.tp == to]
        out[attention.opcode, rec.word_counter(w) + members] += 1
    return out
