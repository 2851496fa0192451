"""Runs a checkpoint step by step without the engine, so that a test decides which tokens each step contains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dtype, StepTable
from megakernel.machine import Machine, host
from megakernel.model.checkpoint import Checkpoint
from megakernel.model.weight_types import bits_of
from megakernel.program import Program
from megakernel.runtime import build_step, create
from megakernel.runtime.backend import Output
from megakernel.runtime.steps import Chunk, SampleRow
from megakernel.scheduler import Options, Spec, compile_program


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens, from position `start`, of the sequence in `slot`. A step computes logits for each of them."""

    slot: int
    start: int
    tokens: Sequence[int]


class Runner:
    """A backend with `max_seqs` sequence slots. The KV pages of each slot are chosen in a shuffled order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: str = "cpu",
        dtype: Dtype = Dtype.F32,
        *,
        machine: Machine | None = None,
        workers: int = 2,
        max_seqs: int = 8,
        max_context: int = 256,
        tp: int = 1,
        q8: bool = False,
        quantised_kv: bool = False,
        **options: Any,
    ) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self.machine = machine or host(workers)
        self.limits = {"max_seqs": max_seqs, "max_context": max_context, "tp": tp, "options": Options(**options)}
        bits = bits_of(checkpoint.config, checkpoint.storage)
        self.weights = {"weight_bits": bits, "q8_activations": q8, "quantised_kv": quantised_kv}
        self._programs: dict[tuple[int, int, int], Program] = {}
        dims = self.program(1, 1).dims
        pages = max_seqs * dims.bucket.pages_per_seq
        order = np.random.default_rng(0).permutation(pages).tolist()
        count = dims.bucket.pages_per_seq
        self.pages = [order[s * count : (s + 1) * count] for s in range(max_seqs)]
        self.backend = create(backend, checkpoint, dims, pages, threads=2)

    def program(self, tokens: int, logit_rows: int, *, workers: int | None = None) -> Program:
        key = tokens, logit_rows, workers or self.machine.workers
        if key not in self._programs:
            machine = replace(self.machine, workers=key[2])
            sizes: dict[str, Any] = {"tokens": tokens, "logit_rows": logit_rows, **self.limits, **self.weights}
            self._programs[key] = compile_program(Spec(self.checkpoint.config, machine, dtype=self.dtype, **sizes))
        return self._programs[key]

    def table(self, program: Program, pieces: Sequence[Piece]) -> StepTable:
        chunks = []
        for p in pieces:
            samples = [SampleRow(i, store=False) for i in range(len(p.tokens))]
            chunks.append(Chunk(p.slot, p.start, p.tokens, self.pages[p.slot], samples))
        table = build_step(program.dims, chunks)
        return table

    def step(
        self, pieces: Sequence[Piece], *, trace: bool = False, workers: int | None = None, padding: int = 0
    ) -> Output:
        """Run one launch of a program that has `padding` more token rows than `pieces` need. The output has a logit row
        for each token of each piece, in order."""
        rows = sum(len(p.tokens) for p in pieces)
        program = self.program(rows + padding, rows + padding, workers=workers)
        return self.backend.launch(program, self.table(program, pieces), trace=trace)

    def logits(self, tokens: Sequence[int], cuts: Sequence[int] = (), slot: int = 0, **options) -> NDArray[np.float32]:
        """Return the logits of one sequence, with shape [len(tokens), vocab]. `cuts` are the positions at which a new
        step begins."""
        edges = [0, *cuts, len(tokens)]
        parts = []
        for start, end in pairwise(edges):
            piece = Piece(slot, start, tokens[start:end])
            parts.append(self.step([piece], **options).logits[: end - start].copy())
        return np.concatenate(parts)

    def close(self) -> None:
        self.backend.close()
