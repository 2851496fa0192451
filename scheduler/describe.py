"""Summarises a program in numbers: instructions, counters, waits, barriers and traffic between ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import MAX_PHASES, Dims, Forward, Units, link_bytes
from megakernel.isa import record as rec
from megakernel.isa.record import Records
from megakernel.program import Program


def describe(program: Program) -> dict[str, Any]:
    """Return counts for one launch, that is, one execution of the program, ready for JSON.

    instructions            of all ranks, with those of a layer counted once per layer
    by_opcode               the same instructions, counted by the name of their phase (operation)
    per_layer               the instructions of one layer, counted by the name of their phase
    workers, ranks, layers, counters (over all layers), bytes (size of the program file)
    all_to_all_per_layer    counters of a layer that act as a barrier between two phases with several instructions
                            each: all instructions of one signal the counter, and all of the other wait for it
    waits_per_instruction   {number of waits: instructions}, with those of a layer counted once per layer
    matmul                  dots (dot products on CUDA cores) or tensor (matrix units); None for a CPU
    lowering                where norms are computed and what ranks share, see the function `lowering`
    link_bytes_per_layer    [from rank][to rank]: bytes that a layer's instructions store on other ranks
    link_bytes              bytes that the instructions of one launch store on other ranks"""
    dims, layers = program.dims, program.dims.model.layers
    segments = ((program.prologue, 1), (program.body, layers), (program.queues, layers), (program.epilogue, 1))
    layer, ends = _link(program, 1), _link(program, 0) + _link(program, 2)
    by_phase: Counter[str] = Counter()
    waits: Counter[int] = Counter()
    for segment, runs in segments:
        for name, count in _names(program, segment.records).items():
            by_phase[name] += count * runs
        used = np.count_nonzero(rec.waits(segment.records), axis=1)
        for number, count in zip(*np.unique(used, return_counts=True), strict=True):
            waits[int(number)] += int(count) * runs
    return {
        "instructions": program.instructions,
        "by_opcode": dict(by_phase),
        "per_layer": _names(program, program.numbered(1)[0]),
        "workers": program.workers,
        "ranks": program.ranks,
        "layers": layers,
        "counters": program.total_counters,
        "bytes": len(program.to_bytes()),
        "all_to_all_per_layer": _all_to_all(program),
        "waits_per_instruction": dict(sorted(waits.items())),
        "matmul": None if dims.worker.units == Units.CORE else Units(dims.worker.units).name.lower(),
        "lowering": lowering(dims, program.forward),
        "link_bytes_per_layer": layer.tolist(),
        "link_bytes": int(layers * layer.sum() + ends.sum()),
    }


def lowering(dims: Dims, forward: Forward) -> dict[str, str]:
    """Return where a layer's norms are computed, and how several ranks share the O projection, residual and experts."""
    inside, ahead = (any(getattr(phase, name) for phase in forward.body) for name in ("norm", "ahead"))
    ranks = {
        "o": "replicated" if dims.split.replicated_o else "sharded",
        "residual": "replicated" if dims.split.replicated_residual else "dealt",
    }
    if dims.model.experts:
        ranks["experts"] = "whole" if dims.split.expert_parallel else "divided"
    return (ranks if dims.split.tp > 1 else {}) | {"norm": "inside" if inside else "next" if ahead else "own"}


def _link(program: Program, segment: int) -> NDArray[np.int64]:
    """Return the bytes that one run of a prologue, layer or epilogue stores on other ranks: [from rank, to rank]."""
    out = np.zeros((program.ranks, program.ranks), dtype=np.int64)
    for phase, dims, _, columns in program.by_phase(segment):
        out[dims.split.rank] += link_bytes(phase, columns, dims)
    return out


def _names(program: Program, records: Records) -> dict[str, int]:
    counts = np.bincount(rec.phase_number(records), minlength=MAX_PHASES + 1).tolist()
    return {phase.name: counts[n] for n, phase in program.forward.by_number.items() if counts[n]}


def _all_to_all(program: Program) -> int:
    """Count the barriers of a layer: counters that all instructions of one phase (operation), on all ranks, signal, and
    for which all instructions of another phase on the counter's rank wait. The result is the count of the rank that has
    most. Signals to a counter of the same layer and of the next layer are not distinguished, because no counter of a
    layer gets both kinds."""
    body, owners = program.numbered(1)
    ranks = [body[owners == rank] for rank in range(program.ranks)]
    sizes = [np.bincount(rec.phase_number(records), minlength=MAX_PHASES + 1)[:, None] for records in ranks]
    size, most = np.sum(sizes, axis=0), 0
    for rank, (records, own) in enumerate(zip(ranks, sizes, strict=True)):
        signals = np.sum([_users(program, r, rec.signals(r), to=rank) for r in ranks], axis=0)
        waits = _users(program, records, rec.waits(records))
        whole = (size > 1) & (signals == size), (own > 1) & (waits == own)
        most = max(most, int((whole[0].any(axis=0) & whole[1].any(axis=0)).sum()))
    return most


def _users(program: Program, records: Records, named: Records, to: int | None = None) -> NDArray[np.int64]:
    """Count, for each phase (operation) and counter, the instructions of the phase that name the counter. Returns an
    array [phase, counter]. `named` has either the wait words or the signal words of `records`; a word names a counter.
    A word that names a grid of counters counts for each of them. A signal word also names a rank: if `to` is given,
    only signals to rank `to` are counted."""
    dims = program.dims
    used = named != 0
    if to is not None:
        used &= np.isin(rec.word_rank(named), (to, rec.OWNER, rec.ALL_RANKS))
    row, slot = np.nonzero(used)
    word, number = named[row, slot], rec.phase_number(records)[row]
    out = np.zeros((MAX_PHASES + 1, program.counters), dtype=np.int64)
    plain = word & rec.INDEXED == 0
    np.add.at(out, (number[plain], rec.word_counter(word[plain])), 1)
    for r, n, w in zip(row[~plain], number[~plain].tolist(), word[~plain], strict=True):
        groups = int(program.forward.by_number[n].columns(records[[r]])["groups"][0]) if to is None else 1
        members = np.arange(dims.bucket.row_blocks * groups)
        if to is not None and rec.word_rank(w) == rec.OWNER:
            members = members[dims.owner(members * dims.bucket.row_block) == to]
        out[n, rec.word_counter(w) + members] += 1
    return out
