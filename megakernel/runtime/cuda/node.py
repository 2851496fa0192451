"""Assigns ranks to GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from .availability import driver, require
from .driver import Gpu


class GpuNode:
    """Assigns ranks to GPUs: each rank gets its own GPU, or all ranks share the first if there are too few GPUs.

    Ranks must run at the same time, because they wait for each other. So ranks that share a GPU run in one grid of
    blocks.
    """

    def __init__(self, ranks: int) -> None:
        require()
        usable = driver().usable
        ordinals = [d.ordinal for d in usable[:ranks]] if ranks <= len(usable) else [usable[0].ordinal]
        self.gpus = [Gpu(ordinal) for ordinal in ordinals]
        self._ranks = ranks
        for a, b in permutations(self.gpus, 2):
            a.reach(b)

    def gpu(self, rank: int) -> Gpu:
        return self.gpus[rank * len(self.gpus) // self._ranks]

    def grids(self) -> Iterator[tuple[Gpu, range]]:
        share = self._ranks // len(self.gpus)
        for i, gpu in enumerate(self.gpus):
            yield gpu, range(i * share, (i + 1) * share)

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.close()
