"""Runs a checkpoint step by step below the engine, so that a test decides what is in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.program import Program
from megakernel.runtime import build_step, check_step, create
from megakernel.runtime.backend import Output
from megakernel.runtime.step import Chunk, SampleRow
from megakernel.scheduler import compile_program


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + len(tokens)) of the sequence in `slot`; every one of them gets logits."""

    slot: int
    start: int
    tokens: Sequence[int]


class Runner:
    """A backend with `max_seqs` slots whose pages are dealt out in a shuffled order."""

    def __init__(
        self, checkpoint, backend="cpu", dtype=Dtype.F32, *, workers=2, threads=2, max_seqs=8, max_context=256
    ):
        self.checkpoint, self.dtype = checkpoint, dtype
        self.machine = machines.host(workers)
        self.limits = {"max_seqs": max_seqs, "max_context": max_context}
        dims = self.program(1, 1).dims
        pages = max_seqs * dims.pages_per_seq
        order = np.random.default_rng(0).permutation(pages).tolist()
        self.pages = [order[s * dims.pages_per_seq : (s + 1) * dims.pages_per_seq] for s in range(max_seqs)]
        self.backend = create(backend, checkpoint, dims, pages, dtype=dtype, threads=threads)

    def program(self, tokens: int, logit_rows: int, *, workers: int | None = None) -> Program:
        machine = replace(self.machine, workers=workers or self.machine.workers)
        return compile_program(
            self.checkpoint.config, machine, dtype=self.dtype, tokens=tokens, logit_rows=logit_rows, **self.limits
        )

    def table(self, program: Program, pieces: Sequence[Piece], targets: dict[int, Sequence[int]] | None = None):
        chunks = [
            Chunk(
                p.slot,
                p.start,
                p.tokens,
                self.pages[p.slot],
                [SampleRow(index=i, target=t, store=False) for i, t in enumerate(self._targets(p, targets))],
            )
            for p in pieces
        ]
        table = build_step(program.dims, chunks)
        check_step(table)
        return table

    @staticmethod
    def _targets(piece: Piece, targets: dict[int, Sequence[int]] | None) -> Sequence[int]:
        return (targets or {}).get(piece.slot) or [-1] * len(piece.tokens)

    def step(self, pieces: Sequence[Piece], *, trace=False, workers: int | None = None, padding=0) -> Output:
        """One launch in a bucket `padding` rows larger than needed; logit rows are the pieces' tokens in order."""
        rows = sum(len(p.tokens) for p in pieces)
        program = self.program(rows + padding, rows + padding, workers=workers)
        return self.backend.launch(program, self.table(program, pieces), trace=trace)

    def logits(self, tokens: Sequence[int], cuts: Sequence[int] = (), slot: int = 0, **options) -> NDArray[np.float32]:
        """Logits of one sequence, [len(tokens), vocab], computed in steps cut at `cuts`."""
        edges = [0, *cuts, len(tokens)]
        parts = []
        for start, end in pairwise(edges):
            piece = Piece(slot, start, tokens[start:end])
            parts.append(self.step([piece], **options).logits[: end - start].copy())
        return np.concatenate(parts)

    def close(self) -> None:
        self.backend.close()
