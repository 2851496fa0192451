"""Sends a workload's requests: all at once or as a Poisson process, with a limit on concurrent requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from time import perf_counter

import numpy as np

from megakernel.errors import MegakernelError
from megakernel.serving.bench.client import Server
from megakernel.serving.bench.report import Outcome
from megakernel.serving.bench.workload import Workload

_STALL_S = 1800.0  # a server counts as dead after so many seconds without an event from any request
_SPARE_FILES = 64  # descriptors that a process needs besides its connections


async def drive(
    server: Server,
    workload: Workload,
    *,
    rate: float = math.inf,
    max_concurrency: int | None = None,
    seed: int = 0,
    stream: bool = True,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Send every job once. Returns the outcomes in the order of the jobs.

    rate             average requests per second of a Poisson process; if infinite, requests are sent as soon as
                     `max_concurrency` allows
    max_concurrency  maximum number of requests in flight; None means no limit
    on_done          called with (answered requests, all requests)

    Raises MegakernelError if no request receives anything for _STALL_S.
    """
    jobs = workload.jobs
    slots = asyncio.Semaphore(max_concurrency or len(jobs))
    _allow_connections(min(max_concurrency or len(jobs), len(jobs)))
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(jobs))) if rate < math.inf else None
    outcomes: list[Outcome | None] = [None] * len(jobs)
    finished = 0

    async def one(index: int) -> None:
        nonlocal finished
        try:
            outcomes[index] = await server.complete(jobs[index], stream=stream)
        finally:
            slots.release()
        finished += 1
        if on_done:
            on_done(finished, len(jobs))

    async def watch() -> None:
        seen, since = -1, perf_counter()
        while True:
            await asyncio.sleep(1.0)
            if server.events != seen:
                seen, since = server.events, perf_counter()
            elif perf_counter() - since > _STALL_S:
                done = f"{finished} of {len(jobs)} requests are done"
                raise MegakernelError(f"{server.url} has sent nothing for {_STALL_S:.0f} s; {done}")

    async def send() -> None:
        start = perf_counter()
        async with asyncio.TaskGroup() as sent:
            for index in range(len(jobs)):
                if moments is not None:
                    await asyncio.sleep(start + moments[index] - perf_counter())
                await slots.acquire()
                sent.create_task(one(index))

    watching, sending = asyncio.ensure_future(watch()), asyncio.ensure_future(send())
    try:
        await asyncio.wait([watching, sending], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        await sending
    finally:
        for task in (watching, sending):
            task.cancel()
        await asyncio.gather(watching, sending, return_exceptions=True)
    return [outcome for outcome in outcomes if outcome is not None]


def _allow_connections(count: int) -> None:
    """Raise this process's limit on open files to what `count` connections need."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise MegakernelError(
                f"{count} connections exceed the system's limit of {hard} open files: lower --max-concurrency"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
