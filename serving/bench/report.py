"""Figures of a benchmark run, defined as in `vllm bench serve`, and their distance from the hardware's limit."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megakernel.isa import Forward, Split
from megakernel.roofline import Ceilings, StepWork, attended, bound, fraction_error, step_work
from megakernel.serving.bench.workload import LoadJob

_MOST_ERRORS = 5  # maximum number of different errors in a report
_BUSY = 0.9  # a client process that is busy for more than this fraction of the time may be the bottleneck


@dataclass
class Outcome:
    """The outcome of one request. All times are seconds of one clock. `moments` holds the arrival times of streamed
    events, of which there is about one per token."""

    job: LoadJob
    start: float
    end: float = 0.0
    moments: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # None if the server did not report the number
    error: str | None = None

    @property
    def outputs(self) -> int:
        return len(self.moments) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        return self.moments[0] - self.start if self.moments else None

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first: (last - first moment) / (tokens - 1)."""
        return (self.moments[-1] - self.moments[0]) / (self.outputs - 1) if self.moments and self.outputs > 1 else None

    @property
    def latency(self) -> float:
        return self.end - self.start


def report(outcomes: Sequence[Outcome], goodput: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the figures of one run. Rates are per second between the first request's start and the last answer.
    `goodput` holds limits in seconds (`ttft`, `tpot`, `e2e`); `goodput_per_s` counts requests that keep all limits.
    `short` counts answers whose number of tokens differs from the number that the request asked for."""
    good = [o for o in outcomes if o.error is None]
    duration = max(o.end for o in outcomes) - min(o.start for o in outcomes)
    prompt = sum(o.job.prompt_tokens if o.prompt_tokens is None else o.prompt_tokens for o in good)
    outputs = sum(o.outputs for o in good)
    gaps = np.concatenate([np.zeros(0), *(np.diff(np.frombuffer(o.moments)) for o in good if len(o.moments) > 1)])
    moments = sorted([(o.start, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    errors = Counter(o.error for o in outcomes if o.error is not None)
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "short": sum(o.outputs != o.job.output_tokens for o in good),
        "duration_s": duration,
        "input_tokens": prompt,
        "output_tokens": outputs,
        "requests_per_s": len(good) / duration,
        "tokens_per_s": outputs / duration,
        "input_tokens_per_s": prompt / duration,
        "total_tokens_per_s": (prompt + outputs) / duration,
        "goodput_per_s": None if goodput is None else sum(_keeps(o, goodput) for o in good) / duration,
        "max_in_flight": int(np.max(np.cumsum([change for _, change in moments]))),
        "ttft_s": spread([t for o in good if (t := o.ttft) is not None]),
        "tpot_s": spread([t for o in good if (t := o.tpot) is not None]),
        "itl_s": spread(gaps),
        "e2e_s": spread([o.latency for o in good]),
        "errors": [f"{count} x {text}" for text, count in errors.most_common(_MOST_ERRORS)],
    }


def cpu_time(spent: dict[str, float], tokens: int, duration: float) -> dict[str, Any]:
    """Return the CPU time of client and server, in total and per generated token, and how busy the client was.
    `client_busy` is the fraction of the time in which the client computed, from 0 to 1. `client_error` warns that the
    client may have been the bottleneck."""
    busy = spent["client"] / duration
    error = f"the client was busy for {busy:.0%} of the time, so it may have been the bottleneck, not the server"
    return {
        "cpu_s": spent,
        "cpu_us_per_token": {kind: seconds / tokens * 1e6 for kind, seconds in spent.items()} if tokens else None,
        "client_busy": busy,
        "client_error": error if busy > _BUSY else None,
    }


def _keeps(outcome: Outcome, limits: dict[str, float]) -> bool:
    measured = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2e": outcome.latency}
    return all((value := measured[name]) is None or value <= limit for name, limit in limits.items())


def spread(values: ArrayLike) -> dict[str, float | None]:
    """Return the mean, the median and the 99th percentile of `values`. Each is None if there are no values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return {"mean": None, "median": None, "p99": None}
    return {"mean": float(array.mean()), "median": float(np.median(array)), "p99": float(np.percentile(array, 99))}


def least_work(forward: Forward, split: Split, jobs: Sequence[LoadJob], in_flight: int, *, tied: bool) -> StepWork:
    """Return the minimum work that any server needs to answer `jobs` if it generates one token per step. The server has
    at most `in_flight` requests at a time. FLOPs and KV bytes are counted as if each prompt were computed in one step
    and each later token in its own step. Every step reads all weights, and there are at least max(longest output, all
    output tokens / in_flight) steps."""
    prompts, outputs = np.array([(job.prompt_tokens, job.output_tokens) for job in jobs]).T
    last = prompts + outputs - 1  # number of tokens that are inputs; the last generated token is never one
    steps = max(int(outputs.max()), -(-int(outputs.sum()) // in_flight))
    whole = step_work(forward, split, last.tolist(), last.tolist(), int(outputs.sum()), tied=tied)
    step = step_work(forward, split, [1], [1], 1, tied=tied)
    pairs, _ = attended(split.model, outputs - 1, last)
    tokens = float(prompts.sum()) + pairs / split.model.layers
    return StepWork(whole.flops, steps * step.weight_bytes, tokens * step.kv_bytes)


def against_roofline(
    work: StepWork, ceilings: Ceilings, seconds: float, server: dict[str, Any] | None
) -> dict[str, float | str | None]:
    """Compare the `seconds` of a run with the least time that `work` can take on the hardware.

    `roofline_fraction` is this least time divided by `seconds`, and `roofline_error` says why a fraction above 1 is
    invalid. `read_GBps` and `gflops` are the bytes and FLOPs of `work` per second. `server` holds the server's own
    figures of its steps. If they show speculative decoding, the result has only `roofline_error`, because `work`
    assumes one token per step and no rejected tokens."""
    if server and server["proposed"]:
        why = (
            f"steps generated {server['tokens_per_step']:.2f} tokens per sequence, so the least time for one token per"
            f" step does not apply; the server's own steps reached {server['roofline_fraction']:.0%} of the roofline"
        )
        return {"roofline_fraction": None, "roofline_error": why, "read_GBps": None, "gflops": None}
    fraction = bound(work, ceilings) / seconds
    error = fraction_error(fraction, ceilings)
    return {
        "roofline_fraction": fraction,
        "roofline_error": error and f"{error}, or the server generates several tokens per step",
        "read_GBps": work.bytes / seconds / 1e9,
        "gflops": work.flops / seconds / 1e9,
    }
