"""Summarises a program in numbers: instructions, counters and traffic between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from megakernel.isa import MAX_PHASES, Dims, Forward, Units, link_bytes
from megakernel.isa import record as rec
from megakernel.program import Program


def describe(program: Program) -> dict[str, Any]:
    """Return counts for one launch, that is, one execution of the program, ready for JSON.

    instructions            of all ranks, with those of a layer counted once per layer
    per_layer               the instructions of one layer, counted by the name of their phase (operation)
    workers, ranks, layers, counters (over all layers), bytes (size of the program file)
    matmul                  dots (dot products on CUDA cores) or tensor (matrix units); None for a CPU
    lowering                where norms are computed, and how ranks share work: the result of `lowering`
    link_bytes              bytes that the instructions of one launch store on other ranks"""
    dims, layers = program.dims, program.dims.model.layers
    counts = np.bincount(rec.phase_number(program.numbered(1)[0]), minlength=MAX_PHASES + 1).tolist()
    return {
        "instructions": program.instructions,
        "per_layer": {phase.name: counts[n] for n, phase in program.forward.by_number.items() if counts[n]},
        "workers": program.workers,
        "ranks": program.ranks,
        "layers": layers,
        "counters": program.total_counters,
        "bytes": len(program.to_bytes()),
        "matmul": None if dims.worker.units == Units.CORE else Units(dims.worker.units).name.lower(),
        "lowering": lowering(dims, program.forward),
        "link_bytes": sum(_link(program, index, runs) for index, runs in enumerate((1, layers, 1))),
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


def _link(program: Program, segment: int, runs: int) -> int:
    """Return the bytes that `runs` runs of a prologue, layer or epilogue store on other ranks."""
    return runs * sum(int(link_bytes(phase, c, dims).sum()) for phase, dims, _, c in program.by_phase(segment))
