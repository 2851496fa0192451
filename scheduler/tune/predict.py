"""Predicts the time of a program's step by simulating a few of its layers."""

from __future__ import annotations

from functools import lru_cache
from math import inf

from megakernel.isa import Dims, StepTable
from megakernel.machine import Machine
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.scheduler.simulate.run import extrapolated_seconds

_CONTEXT = 128  # tokens of each sequence in the KV cache at the end of the simulated step


def predicted_seconds(program: Program, machine: Machine, most_s: float = inf) -> float:
    """Return the predicted seconds of a typical step of `program`, or infinity if the simulation finds early that they
    are at least `most_s`."""
    return extrapolated_seconds(program, machine, usual_step(program.dims), most_s)


@lru_cache(maxsize=4)
def usual_step(dims: Dims) -> StepTable:
    """Return the inputs (step table) of a typical step. All rows of the program are divided evenly among as many
    sequences as the program has room for, and the last row of each sequence gets logits."""
    count = min(dims.bucket.tokens, dims.bucket.max_seqs)
    pages = range(dims.bucket.pages_per_seq)
    chunks = []
    for n in range(count):
        rows = min(dims.bucket.tokens // count + (n < dims.bucket.tokens % count), dims.bucket.max_context)
        start = max(min(_CONTEXT, dims.bucket.max_context) - rows, 0)
        sampled = [SampleRow(rows - 1, prompt_length=start + rows)] if n < dims.bucket.logit_rows else []
        chunks.append(Chunk(n, start, [0] * rows, pages, sampled))
    return build_step(dims, chunks)
