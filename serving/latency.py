"""Batch-1 latency: a prompt, then one token at a time, with the work and the rates behind each figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from ..roofline import Ceilings, Work, achieved
from .engine import Step
from .llm import LLM
from .sampling import SamplingParams


@dataclass(frozen=True)
class Phase:
    """One phase of one run: wall seconds from step to step, the host's share included, and the steps' work."""

    tokens: int
    step_s: list[float]
    work: Work

    @property
    def seconds(self) -> float:
        return sum(self.step_s)


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
            done.append(Run(_phase(steps[: first + 1], llm.config.tied), _phase(steps[first + 1 :], llm.config.tied)))
        if on_run:
            on_run(number)
    return done


def report(runs: list[Run], ceilings: Ceilings) -> dict[str, object]:
    """The figures of `bench latency`: medians over runs, decode first; every run is kept."""
    step_s = median(s for run in runs for s in run.decode.step_s)
    per_run = [median(run.decode.step_s) for run in runs]
    decode = achieved(runs[0].decode.work, ceilings, step_s * len(runs[0].decode.step_s))
    prefill_s = median(run.prefill.seconds for run in runs)
    prefill = achieved(runs[0].prefill.work, ceilings, prefill_s)
    return {
        "tokens_per_s": 1.0 / step_s,
        "step_s": step_s,
        "step_s_min": min(per_run),
        "step_s_max": max(per_run),
        "roofline_fraction": decode.fraction,
        "read_GBps": decode.read_bytes_per_s / 1e9,
        "gflops": decode.flops / 1e9,
        "read_fraction": decode.read_bytes_per_s / ceilings.read_bytes_per_s,
        "prefill": {
            "tokens": runs[0].prefill.tokens,
            "seconds": prefill_s,
            "tokens_per_s": runs[0].prefill.tokens / prefill_s,
            "gflops": prefill.flops / 1e9,
            "fma_fraction": prefill.flops / ceilings.flops,
            "roofline_fraction": prefill.fraction,
        },
        "errors": [phase.error for phase in (decode, prefill) if phase.error],
        "runs": [{"prefill_s": run.prefill.seconds, "decode_step_s": run.decode.step_s} for run in runs],
        "vs": {},
    }


def _phase(steps: list[tuple[Step, float]], tied: bool) -> Phase:
    works = [step.work(tied=tied) for step, _ in steps]
    return Phase(
        tokens=sum(step.rows for step, _ in steps),
        step_s=[seconds for _, seconds in steps],
        work=Work(
            sum(work.flops for work in works),
            sum(work.weight_bytes for work in works),
            sum(work.kv_bytes for work in works),
        ),
    )
