"""Measures the latency of a single sequence: prefill of a prompt, then decode token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from megakernel.roofline import Ceilings, StepWork, achieved, step_work
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.scheduler import Counts
from megakernel.serving.text.llm import LLM


@dataclass(frozen=True)
class Stretch:
    """The measurements of the prefill or decode part of one run. Its steps computed `rows` token rows and generated
    `tokens` tokens. `step_s` has the duration of each step in seconds, including the host's work between steps."""

    rows: int
    tokens: int
    step_s: list[float]
    work: StepWork  # of all steps together

    @property
    def seconds(self) -> float:
        return sum(self.step_s)

    @property
    def step_work(self) -> StepWork:
        """The average work per step."""
        n = len(self.step_s)
        return StepWork(self.work.flops / n, self.work.weight_bytes / n, self.work.kv_bytes / n)


@dataclass(frozen=True)
class Run:
    prefill: Stretch
    decode: Stretch
    counts: Counts  # token counts of prefill and decode together


def measure(llm: LLM, prompt_ids: list[int], decode_steps: int, runs: int, on_run: Callable[[int], None]) -> list[Run]:
    """Measure `runs` runs, each of which continues `prompt_ids` greedily for `decode_steps` steps after the prefill. A
    warm-up run comes first, and its figures are not returned. `on_run` is called with the number of finished runs,
    including the warm-up."""
    params = SamplingParams(temperature=0.0, max_tokens=decode_steps + 1, ignore_eos=True)
    done: list[Run] = []
    for number in range(runs + 1):
        run = _one(llm, prompt_ids, params)
        if number:
            done.append(run)
        on_run(number + 1)
    return done


def report(runs: list[Run], ceilings: Ceilings) -> dict[str, Any]:
    """Return the figures of `bench latency`: medians over all decode steps, and medians over the prefills of all runs.

    With speculative decoding, steps differ in duration and in the number of tokens. If proposed tokens were verified,
    the decode figures come from one run, the run with the median token rate, and `step_s` is the mean duration of its
    steps.

    `roofline_fraction` is the minimum time at the hardware's `ceilings`, divided by the measured time. A fraction above
    1 means that the time or the ceilings are wrong, or that a cache held weights. `errors` then has a message."""
    counts = sum((run.counts for run in runs), Counts())
    if counts.proposed:
        decode = sorted((run.decode for run in runs), key=lambda phase: phase.tokens / phase.seconds)[len(runs) // 2]
        step_s = decode.seconds / len(decode.step_s)
        tokens_per_s = decode.tokens / decode.seconds
    else:
        decode = runs[0].decode  # any run will do: only its FLOPs and bytes are used, which are the same in all runs
        step_s = median(s for run in runs for s in run.decode.step_s)
        tokens_per_s = 1.0 / step_s
    medians = [median(run.decode.step_s) for run in runs]
    prefill_s = median(run.prefill.seconds for run in runs)
    prefill = runs[0].prefill
    decode_rates = achieved(decode.step_work, ceilings, step_s)
    prefill_rates = achieved(prefill.work, ceilings, prefill_s)
    rates = (("decode", decode_rates), ("prefill", prefill_rates))
    return {
        "tokens_per_s": tokens_per_s,
        **counts.figures(),
        "step_s": step_s,
        "step_s_min": min(medians),
        "step_s_max": max(medians),
        "roofline_fraction": decode_rates.fraction,
        "read_GBps": decode_rates.read_bytes_per_s / 1e9,
        "read_fraction": decode_rates.read_bytes_per_s / ceilings.read_bytes_per_s,
        "gflops": decode_rates.flops / 1e9,
        "prefill": {
            "tokens": prefill.rows,
            "seconds": prefill_s,
            "tokens_per_s": prefill.rows / prefill_s,
            "roofline_fraction": prefill_rates.fraction,
            "read_GBps": prefill_rates.read_bytes_per_s / 1e9,
            "gflops": prefill_rates.flops / 1e9,
            "fma_fraction": prefill_rates.flops / ceilings.flops,
        },
        "errors": [f"{name}: {rate.error}" for name, rate in rates if rate.error],
        "runs": [{"prefill_s": run.prefill.seconds, "decode_step_s": run.decode.step_s} for run in runs],
        "vs": {},
    }


def _one(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> Run:
    steps: list[tuple[Step, float]] = []
    moments = [perf_counter()]

    def record(step: Step) -> None:
        moments.append(perf_counter())
        steps.append((step, moments[-1] - moments[-2]))

    llm.engine.reset_prefix_cache()
    before = llm.engine.stats.counts
    llm.generate([prompt_ids], params, on_step=record)
    first = next(i for i, (step, _) in enumerate(steps) if step.tokens)
    tied = llm.config.tied
    counts = llm.engine.stats.counts - before
    return Run(_phase(steps[: first + 1], tied), _phase(steps[first + 1 :], tied), counts)


def _phase(steps: list[tuple[Step, float]], tied: bool) -> Stretch:
    def work(s: Step) -> StepWork:
        return step_work(s.program.forward, s.program.dims.split, s.rows, s.contexts, s.logit_rows, tied=tied)

    works = [work(step) for step, _ in steps]
    return Stretch(
        rows=sum(sum(step.rows) for step, _ in steps),
        tokens=sum(len(step.tokens) for step, _ in steps),
        step_s=[seconds for _, seconds in steps],
        work=StepWork(*(sum(getattr(w, name) for w in works) for name in ("flops", "weight_bytes", "kv_bytes"))),
    )


def typical(steps: list[Step]) -> Step:
    """Return the step with the median duration, because another step may have been disturbed by other work."""
    return sorted(steps, key=lambda step: step.output.seconds)[len(steps) // 2]
