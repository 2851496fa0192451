"""Measures the engine without a server: the latency of a single sequence, prefill and then decode token by token, and
the throughput of many prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from megakernel.roofline import Ceilings, fraction_error, read_rate
from megakernel.runtime.cpu.native import probe_read
from megakernel.serving.bench import LoadJob, Workload
from megakernel.serving.engine.engine import Step
from megakernel.serving.engine.live import Totals
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.scheduler import Counts
from megakernel.serving.text.llm import LLM

_STEADY = 1.1  # if the memory's rates before and after a run differ by a larger factor, the run does not count
_WARM_UP_TOKENS = 4  # tokens that each warm-up request for throughput generates


@dataclass(frozen=True)
class Run:
    """The work of a run's prefill and decode steps, and how long each decode step took."""

    read: tuple[float, float]  # bytes/s at which memory could be read before and after the run; the higher one counts
    prefill: Totals
    decode: Totals
    decode_step_s: list[float]  # seconds, the host's work between steps included
    decode_tokens: int
    counts: Counts  # of the tokens of prefill and decode together

    @property
    def steady(self) -> bool:
        return max(self.read) <= _STEADY * min(self.read)


def measure_latency(
    llm: LLM, prompt_ids: list[int], decode_steps: int, runs: int, ceilings: Ceilings, on_run: Callable[[int], None]
) -> list[Run]:
    """Measure `runs` runs, each of which continues `prompt_ids` greedily for `decode_steps` steps after the prefill. A
    warm-up run comes first, and its figures are not returned. `on_run` is called with the number of finished runs,
    including the warm-up. On a CPU, the memory's read rate is measured before and after each run."""
    params = SamplingParams(temperature=0.0, max_tokens=decode_steps + 1, ignore_eos=True)
    on_cpu, rates, done = llm.engine.backend.name == "cpu", [], []
    for number in range(runs + 1):
        done.append(_decode(llm, prompt_ids, params))
        on_run(number + 1)
        rates.append(read_rate(llm.threads, probe_read) if on_cpu else ceilings.read_bytes_per_s)
    here = replace(ceilings, how=f"{ceilings.how}, but memory before and after each run") if on_cpu else ceilings
    return [_work_of(*one, llm.config.tied, here, read) for one, read in zip(done[1:], pairwise(rates), strict=True)]


def latency_figures(every: list[Run]) -> dict[str, Any]:
    """Return the figures of `bench latency`. If the memory's rate was steady during some runs, only these count.
    Otherwise `errors` has a message. Decode figures come from the run with the median token rate, prefill figures from
    the run with the median prefill. `step_s` is the median time of the run's steps. If proposed tokens were verified,
    it is the mean time, because such steps differ in duration and in the number of tokens.

    `roofline_fraction` is the minimum time at the hardware's ceilings, divided by the measured time. A fraction above
    1 means that the time or the ceilings are wrong, or that a cache held weights. `errors` then has a message."""
    runs = [run for run in every if run.steady] or every
    counts = sum((run.counts for run in runs), Counts())
    run = sorted(runs, key=lambda run: run.decode_tokens / run.decode.wall_s)[len(runs) // 2]
    step_s = run.decode.wall_s / run.decode.steps if counts.proposed else median(run.decode_step_s)
    decode_s, ceilings = step_s * run.decode.steps, run.decode.ceilings
    medians = [median(run.decode_step_s) for run in runs]
    prompt = sorted((run.prefill for run in runs), key=lambda prefill: prefill.wall_s)[len(runs) // 2]
    decode, prefill = run.decode.rates(decode_s), prompt.rates(prompt.wall_s)
    errors = {"decode": fraction_error(decode["roofline_fraction"], ceilings)}
    errors["prefill"] = fraction_error(prefill["roofline_fraction"], ceilings)
    errors["memory"] = None if runs[0].steady else "its speed changed by more than a tenth during every run"
    return {
        "tokens_per_s": run.decode_tokens / decode_s,
        **counts.figures(),
        "step_s": step_s,
        "step_s_min": min(medians),
        "step_s_max": max(medians),
        **decode,
        "read_fraction": decode["read_GBps"] * 1e9 / ceilings.read_bytes_per_s,
        "prefill": {
            "tokens": prompt.rows,
            "seconds": prompt.wall_s,
            "tokens_per_s": prompt.rows / prompt.wall_s,
            **prefill,
            "fma_fraction": prefill["gflops"] * 1e9 / ceilings.flops,
        },
        "errors": [f"{name}: {error}" for name, error in errors.items() if error],
        "runs": [{"prefill_s": r.prefill.wall_s, "decode_step_s": r.decode_step_s, "read": r.read} for r in every],
        "vs": {},
        "ceilings": asdict(ceilings),
    }


def _decode(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> tuple[list[tuple[Step, float]], Counts]:
    """Generate once, without cached prefixes. Return each step with its seconds, and the run's token counts."""
    steps: list[Step] = []
    llm.engine.reset_prefix_cache()
    before, began = llm.engine.stats.counts, perf_counter()
    llm.generate([prompt_ids], params, on_step=steps.append)
    times = (end - start for start, end in pairwise([began, *(step.tokens.at for step in steps)]))
    return list(zip(steps, times, strict=True)), llm.engine.stats.counts - before


def _work_of(
    steps: list[tuple[Step, float]], counts: Counts, tied: bool, ceilings: Ceilings, read: tuple[float, float]
) -> Run:
    ceilings = replace(ceilings, read_bytes_per_s=max(read))
    first = next(i for i, (step, _) in enumerate(steps) if step.tokens) + 1
    prefill, decode = Totals(ceilings, tied), Totals(ceilings, tied)
    for number, (step, seconds) in enumerate(steps):
        (prefill if number < first else decode).add(step, seconds)
    times = [seconds for _, seconds in steps[first:]]
    return Run(read, prefill, decode, times, sum(len(step.tokens) for step, _ in steps[first:]), counts)


def measure_throughput(
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
    _generate(llm, short, ceilings, lambda step: None)
    done = []
    for number in range(runs):
        done.append(_generate(llm, load.again(number).jobs, ceilings, count))
        after_run()
    return done


def _generate(llm: LLM, jobs: Sequence[LoadJob], ceilings: Ceilings, on_step: Callable[[Step], None]) -> dict[str, Any]:
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
