"""Batch-1 latency: a prompt, then one token at a time, with the work and the rates behind each figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from ..roofline import Ceilings, step_work
from .engine import Step
from .llm import LLM
from .sampling import SamplingParams


@dataclass(frozen=True)
class Phase:
    """One phase of one run. Seconds are wall time from step to step, the host's share included.

    `bytes` counts each weight and each live KV byte once per step, `flops` a multiply-add as two.
    """

    tokens: int
    step_s: list[float]
    flops: float
    bytes: float

    @property
    def seconds(self) -> float:
        return sum(self.step_s)

    def bound_s(self, ceilings: Ceilings) -> float:
        """The least time the measured ceilings allow."""
        return max(self.bytes / ceilings.read_bytes_per_s, self.flops / ceilings.f32_flops)


@dataclass(frozen=True)
class Run:
    prefill: Phase
    decode: Phase


def measure(
    llm: LLM, prompt_ids: list[int], tokens: int, runs: int, on_run: Callable[[int], None] | None = None
) -> list[Run]:
    """`runs` greedy continuations of `prompt_ids` by `tokens` tokens each, after one that is not counted."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    done: list[Run] = []
    for number in range(runs + 1):
        steps: list[tuple[Step, float]] = []
        last = perf_counter()

        def record(step: Step, steps: list[tuple[Step, float]] = steps) -> None:
            nonlocal last
            now = perf_counter()
            steps.append((step, now - last))
            last = now

        llm.generate([prompt_ids], params, on_step=record)
        first = next(i for i, (step, _) in enumerate(steps) if step.tokens)
        if number:
            done.append(Run(_phase(steps[: first + 1]), _phase(steps[first + 1 :])))
        if on_run:
            on_run(number)
    return done


def report(runs: list[Run], ceilings: Ceilings) -> dict[str, object]:
    """The figures of `bench latency`: medians over runs, decode first; every run is kept.

    A roofline fraction is the bound of the measured ceilings over the achieved time.
    """
    steps = [s for run in runs for s in run.decode.step_s]
    step_s = median(steps)
    per_run = [median(run.decode.step_s) for run in runs]
    best = runs[0].decode  # work is the same in every run
    count = len(best.step_s)
    prefill_s = median(run.prefill.seconds for run in runs)
    prefill = runs[0].prefill
    return {
        "tokens_per_s": 1.0 / step_s,
        "step_s": step_s,
        "step_s_min": min(per_run),
        "step_s_max": max(per_run),
        "roofline_fraction": best.bound_s(ceilings) / count / step_s,
        "read_GBps": best.bytes / count / step_s / 1e9,
        "gflops": best.flops / count / step_s / 1e9,
        "read_fraction": best.bytes / count / step_s / ceilings.read_bytes_per_s,
        "prefill": {
            "tokens": prefill.tokens,
            "seconds": prefill_s,
            "tokens_per_s": prefill.tokens / prefill_s,
            "gflops": prefill.flops / prefill_s / 1e9,
            "fma_fraction": prefill.flops / prefill_s / ceilings.f32_flops,
            "roofline_fraction": prefill.bound_s(ceilings) / prefill_s,
        },
        "runs": [{"prefill_s": run.prefill.seconds, "decode_step_s": run.decode.step_s} for run in runs],
        "vs": {},
    }


def _phase(steps: list[tuple[Step, float]]) -> Phase:
    works = [step_work(step.program.dims, step.rows, step.contexts, step.logit_rows) for step, _ in steps]
    return Phase(
        tokens=sum(step.rows for step, _ in steps),
        step_s=[seconds for _, seconds in steps],
        flops=sum(work.flops for work in works),
        bytes=sum(work.weight_bytes + work.kv_bytes for work in works),
    )
