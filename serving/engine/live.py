"""Adds up the time and the work of an engine's steps, and compares them with the hardware's limits.

The main figure is sum(bound) / sum(wall). A step's bound is the least time that its tokens and its KV cache need at the
measured ceilings (`megakernel.roofline`). Its wall time begins when the previous step ends or, after
a pause, when work arrives. So it includes the host's work between steps."""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.roofline import Ceilings, bound, step_work
from megakernel.serving.engine.engine import Step


@dataclass
class Totals:
    """Sums over `steps` steps. `tied` says that the LM head uses the embedding table as its weights."""

    ceilings: Ceilings
    tied: bool
    steps: int = 0
    wall_s: float = 0.0  # wall time in seconds
    bound_s: float = 0.0  # minimum time that the hardware's ceilings allow, in seconds
    flops: float = 0.0  # floating-point operations
    bytes: float = 0.0  # bytes of weights and KV cache
    rows: int = 0  # token rows that were computed
    sequences: int = 0  # number of sequences of each step, summed over the steps

    def add(self, step: Step, wall_s: float) -> None:
        """Add a step that took `wall_s` seconds."""
        split, turns = step.program.dims.split, step.part.turns
        contexts = (step.part.start + turns.count).tolist()  # tokens of each sequence in the KV cache after the step
        work = step_work(step.program.forward, split, step.rows, contexts, len(turns.chunk), tied=self.tied)
        self.steps += 1
        self.wall_s += wall_s
        self.bound_s += bound(work, self.ceilings)
        self.flops += work.flops
        self.bytes += work.bytes
        self.rows += sum(step.rows)
        self.sequences += len(step.rows)

    def rates(self, seconds: float) -> dict[str, float]:
        """Return the fraction of the roofline and the rates of the steps, if they took `seconds` together."""
        return {
            "roofline_fraction": self.bound_s / seconds,
            "read_GBps": self.bytes / seconds / 1e9,
            "gflops": self.flops / seconds / 1e9,
        }
