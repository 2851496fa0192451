"""Measures offline throughput: the time to finish many prompts, and the work and rates of the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from megakernel.roofline import Ceilings, fraction_error
from megakernel.serving.bench import LoadJob, Workload
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.live import Totals
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.text.llm import LLM

_WARM_UP_TOKENS = 4  # tokens that each warm-up request generates


def measure(
    llm: LLM,
    load: Workload,
    runs: int,
    ceilings: Ceilings,
    on_progress: Callable[[int, int], None],
    after_run: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure how long the engine takes for all prompts of `load`, `runs` times, and return the figures of each run. A
    few short requests come first, to fill caches and compile programs. If the prompts are random, each run has
    different ones. `on_progress` gets (tokens so far, tokens in total), and `after_run` is called after each run."""
    total = runs * sum(job.output_tokens for job in load.jobs)
    made = 0

    def count(step: Step) -> None:
        nonlocal made
        made += len(step.tokens)
        on_progress(made, total)

    some = load.again(runs).jobs[: 2 * llm.engine.dims.bucket.max_seqs]
    short = [replace(job, output_tokens=min(job.output_tokens, _WARM_UP_TOKENS)) for job in some]
    _one(llm, short, ceilings, lambda step: None)
    done = []
    for number in range(runs):
        done.append(_one(llm, load.again(number).jobs, ceilings, count))
        after_run()
    return done


def _one(llm: LLM, jobs: Sequence[LoadJob], ceilings: Ceilings, on_step: Callable[[Step], None]) -> dict[str, Any]:
    engine = llm.engine
    totals = Totals(ceilings, llm.config.tied)
    ended = 0.0

    def record(step: Step) -> None:
        nonlocal ended
        before, ended = ended, perf_counter()
        totals.add(step, ended - before)
        on_step(step)

    prompts = [job.prompt if isinstance(job.prompt, str) else job.prompt.tolist() for job in jobs]
    params = [SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True) for job in jobs]
    before = engine.stats.counts
    began = ended = perf_counter()
    results = llm.generate(prompts, params, on_step=record)
    seconds = perf_counter() - began
    inputs, outputs = sum(len(r.prompt_token_ids) for r in results), sum(len(r.token_ids) for r in results)
    return {
        "completed": len(results),
        "duration_s": seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "requests_per_s": len(results) / seconds,
        "tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (inputs + outputs) / seconds,
        "steps": totals.steps,
        **(engine.stats.counts - before).figures(),
        "step_s": totals.wall_s / totals.steps,
        "sequences": totals.sequences / totals.steps,
        **totals.rates(seconds),
        "error": fraction_error(totals.bound_s / seconds, ceilings),
    }
