"""Sends workloads to servers, all requests at once or as a Poisson process. Several servers get them in alternation (A
B A B), so that other load on the machine affects all servers alike."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from megakernel.errors import MegakernelError
from megakernel.serving.bench.client import CPU, RefusedError, ServerClient
from megakernel.serving.bench.report import Outcome, cpu_time, report
from megakernel.serving.bench.workload import LoadJob, Workload
from megakernel.serving.engine.scheduler import Counts

_WARM_UP_TOKENS = 4  # output tokens of each warm-up request
_STALL_S = 1800.0  # a server counts as dead after so many seconds without an event from any request
# The metrics that a server sums over its steps: their number, wall time, least time, and the fields of `Counts`.
_STEPS = (
    "megakernel:steps_total",
    "megakernel:step_seconds_total",
    "megakernel:step_bound_seconds_total",
    "vllm:generation_tokens_total",
    "megakernel:step_sequences_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
OnDone = Callable[[int, int], None]  # called with (answered requests, all requests)


@dataclass(frozen=True)
class Load:
    """How a benchmark sends its requests."""

    rate: float = math.inf  # average requests per second of a Poisson process; infinite: as `max_concurrency` allows
    max_concurrency: int | None = None  # maximum number of requests in flight; None means no limit
    stream: bool = True
    goodput: dict[str, float] | None = None  # limits for goodput (see `report`)
    seed: int = 0
    warm_up: int = 8  # requests with short answers before each server's first run


async def alternate(
    servers: list[ServerClient], workload: Workload, load: Load, runs: int, on_done: OnDone | None = None
) -> list[list[dict[str, Any]]]:
    """Run the workload `runs` times on each server, in alternation. Returns, for each server, the figures of its runs.
    If the prompts are random token ids, each run of a server has different ids, so that no prefix cache helps. The
    entry `server` of a run's figures holds what the server itself reports in `/metrics` about the steps of the run. The
    entry is None if the server does not report steps or counted none."""
    some = workload.again(runs).jobs[: load.warm_up]
    short = [replace(job, output_tokens=min(job.output_tokens, _WARM_UP_TOKENS)) for job in some]
    for server in servers:
        if short:
            await drive(server, Workload("warm-up", short), Load(max_concurrency=load.max_concurrency))
    figures: list[list[dict[str, Any]]] = [[] for _ in servers]
    total = runs * len(servers) * len(workload.jobs)

    def told(before: int, done: int, _: int) -> None:
        if on_done:
            on_done(before + done, total)

    for number in range(runs * len(servers)):
        which = number % len(servers)
        server = servers[which]
        before = await server.metrics()
        began = time.process_time()
        on_answer = partial(told, number * len(workload.jobs))
        outcomes = await drive(server, workload.again(number // len(servers)), load, on_answer)
        after = await server.metrics()
        spent = {
            name.removeprefix(CPU).partition('"')[0]: seconds - before.get(name, 0.0)
            for name, seconds in after.items()
            if name.startswith(CPU)
        }
        figure = report(outcomes, load.goodput)
        spent["client"] = time.process_time() - began
        figure |= cpu_time(spent, figure["output_tokens"], figure["duration_s"])
        figures[which].append(figure | {"server": _steps(before, after)})
    return figures


def _steps(before: dict[str, float], after: dict[str, float]) -> dict[str, Any] | None:
    """Return the figures of the steps that a server ran between its answers `before` and `after` to GET /metrics.
    The result is None if it ran no steps or does not report them."""
    steps, wall, bound, *counts = (after.get(name, 0.0) - before.get(name, 0.0) for name in _STEPS)
    if steps <= 0 or wall <= 0:
        return None
    return {"steps": int(steps), "step_s": wall / steps, "roofline_fraction": bound / wall} | Counts(
        *map(int, counts)
    ).figures()


async def describe(server: ServerClient) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for path in ("/props", "/version"):  # llama-server has only the first
        with suppress(RefusedError, msgspec.DecodeError):
            facts |= msgspec.json.decode(await server.get(path), type=dict[str, Any])
    return {"url": server.url, "model": server.model, "version": facts.get("version") or facts.get("build_info")}


async def drive(server: ServerClient, workload: Workload, load: Load, on_done: OnDone | None = None) -> list[Outcome]:
    """Send every job once, from this process. Returns the outcomes in the order of the jobs. Raises MegakernelError if
    no request receives anything for _STALL_S."""
    jobs, most = workload.jobs, load.max_concurrency or len(workload.jobs)
    slots = asyncio.Semaphore(most)
    with suppress(ValueError, OSError):  # each connection takes a file, and the usual limit is 1,024
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    moments = np.cumsum(np.random.default_rng(load.seed).exponential(1 / load.rate, len(jobs)))
    finished = 0

    async def one(job: LoadJob) -> Outcome:
        nonlocal finished
        try:
            outcome = await server.complete(job, stream=load.stream)
        finally:
            slots.release()
        finished += 1
        if on_done:
            on_done(finished, len(jobs))
        return outcome

    async def watch() -> None:
        seen, since = -1, perf_counter()
        while True:
            await asyncio.sleep(1.0)
            if server.received != seen:
                seen, since = server.received, perf_counter()
            elif perf_counter() - since > _STALL_S:
                done = f"{finished} of {len(jobs)} requests are done"
                raise MegakernelError(f"{server.url} has sent nothing for {_STALL_S:.0f} s; {done}")

    async def send() -> list[Outcome]:
        start, tasks = perf_counter(), []
        async with asyncio.TaskGroup() as sent:
            for job, moment in zip(jobs, moments, strict=True):
                await asyncio.sleep(start + moment - perf_counter())
                await slots.acquire()
                tasks.append(sent.create_task(one(job)))
        return [task.result() for task in tasks]

    watching, sending = asyncio.ensure_future(watch()), asyncio.ensure_future(send())
    try:
        await asyncio.wait([watching, sending], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await sending
    finally:
        for task in (watching, sending):
            task.cancel()
        await asyncio.gather(watching, sending, return_exceptions=True)
