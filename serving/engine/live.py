"""A running record of an engine's steps: how close they come to the hardware's limits, and the latency of requests.

The main figure is sum(bound) / sum(wall). A step's bound is the least time that its tokens and its KV cache need at the
measured ceilings (`megakernel.roofline`). Its wall time runs from the end of the previous step, or from the arrival of
work, to its own end, so it includes the host's work between steps."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.program import Program
from megakernel.roofline import Ceilings, achieved, fraction_error, step_work
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.scheduler import Stats
from megakernel.trace import Trace

WINDOW_S = 10.0  # total wall time of the latest steps from which rates are computed
_SHOWN = 240  # latest steps that a snapshot lists one by one
_KEPT = 4096  # maximum number of recorded steps, and of samples of each latency
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over `steps` steps."""

    steps: int = 0
    wall_s: float = 0.0  # wall time in seconds
    bound_s: float = 0.0  # minimum time that the hardware's ceilings allow, in seconds
    flops: float = 0.0  # floating-point operations
    bytes: float = 0.0  # bytes of weights and KV cache
    rows: int = 0  # token rows that were computed
    tokens: int = 0  # tokens that were sampled
    sequences: int = 0  # sequences of each step, summed over the steps

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def rates(self, ceilings: Ceilings) -> dict[str, float | None]:
        """Return averages per second and per step, and fractions of `ceilings`; each is None if no step has run."""
        wall, steps = self.wall_s or math.nan, self.steps or math.nan
        figures = {
            "roofline_fraction": self.bound_s / wall,
            "step_s": wall / steps,
            "tokens_per_s": self.tokens / wall,
            "rows_per_s": self.rows / wall,
            "read_bytes_per_s": self.bytes / wall,
            "read_fraction": self.bytes / wall / ceilings.read_bytes_per_s,
            "flops_per_s": self.flops / wall,
            "flops_fraction": self.flops / wall / ceilings.flops,
            "sequences": self.sequences / steps,
        }
        return {name: None if math.isnan(value) else value for name, value in figures.items()}


class Live:
    """The record of one engine's steps. The engine's thread adds steps, and any thread may read.

    `stats` is the engine's current state. `tied` says that the LM head uses the embedding table as its weights.
    `max_seqs` is how many sequences may run at once, and `about` describes the engine for people. While `tracing` is
    True, the engine's thread should trace the next step."""

    def __init__(self, ceilings: Ceilings, stats: Stats, *, tied: bool, max_seqs: int, about: dict[str, Any]) -> None:
        self.ceilings = ceilings
        self._stats = stats
        self._tied, self._max_seqs, self._about = tied, max_seqs, about
        self._lock = threading.Lock()
        # For each step, its figures and the limit of the hardware that it is closest to.
        self._steps: deque[tuple[Totals, str]] = deque(maxlen=_KEPT)
        self._totals = Totals()
        self._ttft: deque[float] = deque(maxlen=_KEPT)
        self._itl: deque[float] = deque(maxlen=_KEPT)
        self._traced: tuple[Program, Trace] | None = None
        self._trace_made = threading.Event()
        self.tracing = False

    def add(self, step: Step, wall_s: float, stats: Stats) -> None:
        """Record a step that took `wall_s` seconds, and the engine's state after it."""
        rows = step.rows
        forward, dims = step.program.forward, step.program.dims
        work = step_work(forward, dims.split, rows, step.contexts, step.logit_rows, tied=self._tied)
        reached = achieved(work, self.ceilings, wall_s)
        bound = reached.fraction * wall_s
        sums = Totals(1, wall_s, bound, work.flops, work.bytes, sum(rows), len(step.reader), len(rows))
        with self._lock:
            self._steps.append((sums, reached.limit))
            self._totals += sums
            self._stats = stats
            self._ttft.extend(step.waited[step.first].tolist())
            self._itl.extend(step.waited[~step.first].tolist())
            if step.output.trace is not None:
                self._traced, self.tracing = (step.program, step.output.trace), False
                self._trace_made.set()

    def totals(self) -> Totals:
        """Sums since the start."""
        with self._lock:
            return self._totals

    def _error(self, totals: Totals) -> str | None:
        """Return why the roofline fractions are invalid, for example because one is above 1; None if they are valid."""
        if self._about.get("backend") == "null":
            return "the null backend computes nothing, so it has no roofline fraction"
        return fraction_error(totals.bound_s / totals.wall_s, self.ceilings) if totals.steps else None

    def trace(self, wait_s: float) -> tuple[Program, Trace] | None:
        """Have the next step traced, and return its program and trace. If no traced step ends within `wait_s` seconds,
        the result is the previously traced step, or None if no step was traced."""
        self._trace_made.clear()
        self.tracing = True
        self._trace_made.wait(wait_s)
        self.tracing = False
        return self._traced

    def snapshot(self) -> dict[str, Any]:
        """Return the whole record as JSON values. It has the current state, the rates over the last WINDOW_S seconds of
        work, the totals, the latencies, and the latest steps one by one."""
        with self._lock:
            steps, totals = list(self._steps), self._totals
            ttft, itl = np.array(self._ttft), np.array(self._itl)
            stats = self._stats
        recent = Totals()
        by_limit: dict[str, float] = {}
        for sums, limit in reversed(steps):
            if recent.wall_s >= WINDOW_S:
                break
            recent += sums
            by_limit[limit] = by_limit.get(limit, 0.0) + sums.wall_s
        shown = steps[-_SHOWN:]
        return {
            "about": self._about,
            "ceilings": asdict(self.ceilings),
            "limits": {"max_seqs": self._max_seqs, "kv_pages": stats.pages},
            "counts": asdict(stats.counts),
            "now": {"running": stats.running, "waiting": stats.waiting, "kv_pages_used": stats.pages_used},
            "error": self._error(recent),
            "window": recent.rates(self.ceilings) | {"limited_by": {k: v / recent.wall_s for k, v in by_limit.items()}},
            "total": asdict(totals) | totals.rates(self.ceilings),
            "ttft_s": _percentiles(ttft),
            "itl_s": _percentiles(itl),
            "steps": {
                name: [getattr(sums, name) for sums, _ in shown] for name in ("wall_s", "bound_s", "rows", "sequences")
            }
            | {"limit": [limit for _, limit in shown]},
        }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    found = np.percentile(values, _PERCENTILES).tolist() if len(values) else [None] * len(_PERCENTILES)
    return {f"p{p}": value for p, value in zip(_PERCENTILES, found, strict=True)}
