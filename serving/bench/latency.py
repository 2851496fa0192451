"""Measures the latency of a single sequence: prefill of a prompt, then decode token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from megakernel.roofline import Ceilings, fraction_error
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.live import Totals
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.scheduler import Counts
from megakernel.serving.text.llm import LLM


@dataclass(frozen=True)
class Run:
    """The work of a run's prefill and of its decode steps, with the times of the steps, which include the host's work
    between them. `counts` has the numbers of tokens of both together."""

    prefill: Totals
    decode: Totals
    decode_step_s: list[float]
    decode_tokens: int
    counts: Counts


def measure(
    llm: LLM, prompt_ids: list[int], decode_steps: int, runs: int, ceilings: Ceilings, on_run: Callable[[int], None]
) -> list[Run]:
    """Measure `runs` runs, each of which continues `prompt_ids` greedily for `decode_steps` steps after the prefill. A
    warm-up run comes first, and its figures are not returned. `on_run` is called with the number of finished runs,
    including the warm-up."""
    params = SamplingParams(temperature=0.0, max_tokens=decode_steps + 1, ignore_eos=True)
    done: list[Run] = []
    for number in range(runs + 1):
        run = _one(llm, prompt_ids, params, ceilings)
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
        run = sorted(runs, key=lambda run: run.decode_tokens / run.decode.wall_s)[len(runs) // 2]
        step_s = run.decode.wall_s / run.decode.steps
        tokens_per_s = run.decode_tokens / run.decode.wall_s
    else:
        run = runs[0]  # any run will do: only its FLOPs and bytes are used, which are the same in all runs
        step_s = median(s for run in runs for s in run.decode_step_s)
        tokens_per_s = 1.0 / step_s
    medians = [median(run.decode_step_s) for run in runs]
    prefill_s = median(run.prefill.wall_s for run in runs)
    decode, prefill = run.decode.rates(step_s * run.decode.steps), run.prefill.rates(prefill_s)
    errors = {"decode": fraction_error(decode["roofline_fraction"], ceilings)}
    errors["prefill"] = fraction_error(prefill["roofline_fraction"], ceilings)
    return {
        "tokens_per_s": tokens_per_s,
        **counts.figures(),
        "step_s": step_s,
        "step_s_min": min(medians),
        "step_s_max": max(medians),
        **decode,
        "read_fraction": decode["read_GBps"] * 1e9 / ceilings.read_bytes_per_s,
        "prefill": {
            "tokens": run.prefill.rows,
            "seconds": prefill_s,
            "tokens_per_s": run.prefill.rows / prefill_s,
            **prefill,
            "fma_fraction": prefill["gflops"] * 1e9 / ceilings.flops,
        },
        "errors": [f"{name}: {error}" for name, error in errors.items() if error],
        "runs": [{"prefill_s": run.prefill.wall_s, "decode_step_s": run.decode_step_s} for run in runs],
        "vs": {},
    }


def _one(llm: LLM, prompt_ids: list[int], params: SamplingParams, ceilings: Ceilings) -> Run:
    steps: list[tuple[Step, float]] = []
    moments = [perf_counter()]

    def record(step: Step) -> None:
        moments.append(perf_counter())
        steps.append((step, moments[-1] - moments[-2]))

    llm.engine.reset_prefix_cache()
    before = llm.engine.stats.counts
    llm.generate([prompt_ids], params, on_step=record)
    first = next(i for i, (step, _) in enumerate(steps) if step.tokens) + 1
    prefill, decode = Totals(ceilings, llm.config.tied), Totals(ceilings, llm.config.tied)
    for number, (step, seconds) in enumerate(steps):
        (prefill if number < first else decode).add(step, seconds)
    return Run(
        prefill,
        decode,
        [seconds for _, seconds in steps[first:]],
        sum(len(step.tokens) for step, _ in steps[first:]),
        llm.engine.stats.counts - before,
    )


def typical(steps: list[Step]) -> Step:
    """Return the step with the median duration, because another step may have been disturbed by other work."""
    return sorted(steps, key=lambda step: step.output.seconds)[len(steps) // 2]
