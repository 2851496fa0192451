"""Steps that mix prompts and decode rows, for tests of ranks on any backend."""

from itertools import product, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Buffer, StepTable
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.scheduler import describe

PAGES = 40


class Mixed:
    """Runs three steps that mix prefill and decode of two prompts; the longer prompt is split over two steps. Decode
    rows read the token that an earlier step sampled. KV cache that no sequence wrote contains the value `noise`. Step k
    uses the k-th program, or the last if there are fewer."""

    def __init__(self, backend: Any, *programs: Program, noise: float = 0.0) -> None:
        dims = self.dims = programs[0].dims
        self.backend, self.programs = backend, programs
        caches = Buffer.K_CACHE, Buffer.V_CACHE
        for rank, buffer, layer in product(range(dims.split.tp), caches, range(dims.model.layers)):
            self.backend.buffer(buffer, layer, rank)[...] = noise
        self.prompts = [np.random.default_rng(n).integers(0, dims.model.vocab, n).tolist() for n in (17, 26)]
        self.tokens: list[int] = []
        self.link_bytes = 0  # bytes that all launches should have stored on other ranks

    def steps(self) -> list[tuple[Program, StepTable]]:
        pages = np.random.default_rng(1).permutation(PAGES).reshape(2, -1)
        short, long = self.prompts
        # The chunks of each step: (sequence slot, first position, token ids, indices of the rows that are sampled).
        # The id -1 stands for the token in HISTORY, which an earlier step sampled.
        plan: list[list[tuple[int, int, list[int], list[int]]]] = [
            [(0, 0, short, [16]), (1, 0, long[:5], [])],
            [(1, 5, long[5:], [0, 8, 20]), (0, 17, [-1], [0])],
            [(0, 18, [-1], [0]), (1, 26, [-1], [0])],
        ]
        steps = []
        for pieces, program in zip_longest(plan, self.programs[: len(plan)], fillvalue=self.programs[-1]):
            chunks = []
            for slot, start, tokens, sampled in pieces:
                rows = [SampleRow(i, store=start + i >= 16) for i in sampled]
                chunks.append(Chunk(slot, start, tokens, pages[slot], rows))
            table = build_step(program.dims, chunks)
            steps.append((program, table))
        return steps

    def run(self) -> NDArray[np.float32]:
        """Run all steps and return their logits, [rows, vocab]. Appends the sampled tokens to `tokens`."""
        logits = []
        for program, table in self.steps():
            out = self.backend.launch(program, table)
            rows = int((table.logit_rows >= 0).sum())
            logits.append(out.logits[:rows].copy())
            self.tokens += out.tokens[:rows].tolist()
            stored = int((table.sample_slot >= 0).sum())  # tokens, which go to HISTORY of all other ranks
            self.link_bytes += describe(program)["link_bytes"] + 4 * (self.dims.split.tp - 1) * stored
        return np.concatenate(logits)
