"""Sends a load from several client processes, because one may be too slow for a server, and counts their CPU time."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from megakernel.serving.bench.client import Server
from megakernel.serving.bench.drive import drive
from megakernel.serving.bench.report import Outcome
from megakernel.serving.bench.workload import Workload

_LOOK_S = 0.2  # interval between two progress reports


async def drive_from(
    processes: int,
    server: Server,
    workload: Workload,
    *,
    rate: float,
    max_concurrency: int | None,
    seed: int,
    stream: bool,
    on_done: Callable[[int, int], None] | None,
) -> tuple[list[Outcome], float]:
    """Call `drive` in up to `processes` processes. Returns the outcomes and the CPU seconds of the clients.

    Each of n processes sends every n-th job, at 1/n of `rate` and with 1/n of `max_concurrency` requests in flight.
    """
    processes = min(processes, len(workload.jobs), max_concurrency or len(workload.jobs))
    how: dict[str, Any] = {"rate": rate / processes, "stream": stream}
    if processes == 1:
        before = time.process_time()
        outcomes = await drive(
            server, workload, max_concurrency=max_concurrency, seed=seed, on_done=on_done, rate=rate, stream=stream
        )
        return outcomes, time.process_time() - before
    context = multiprocessing.get_context("spawn")
    count: Synchronized[int] = context.Value("q", 0)
    shares = [replace(workload, jobs=workload.jobs[i::processes]) for i in range(processes)]
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(processes, context, _share, (count,)) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, time.sleep, _LOOK_S) for _ in shares))  # until all run
        parts = [
            loop.run_in_executor(
                pool,
                _part,
                server.spec,
                share,
                how
                | {
                    "seed": seed + i,
                    "max_concurrency": max_concurrency and (max_concurrency + i) // processes,
                },
            )
            for i, share in enumerate(shares)
        ]
        while (await asyncio.wait(parts, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION))[1]:
            if on_done:
                on_done(count.value, len(workload.jobs))
            if any(part.done() and part.exception() for part in parts):
                break
        done = await asyncio.gather(*parts)
    found = [outcome for outcomes, _ in done for outcome in outcomes]
    return found, sum(seconds for _, seconds in done)


_count: Synchronized[int]


def _share(count: Synchronized[int]) -> None:
    """Store the counter of answered requests, which all client processes share, in a new client process."""
    global _count
    _count = count


def _part(spec: dict[str, Any], share: Workload, how: dict[str, Any]) -> tuple[list[Outcome], float]:
    """Send one process's part of the load. Returns the outcomes and the process's CPU seconds."""

    def count(done: int, of: int) -> None:
        with _count.get_lock():
            _count.value += 1

    async def send() -> list[Outcome]:
        server = Server(**spec)
        try:
            return await drive(server, share, on_done=count, **how)
        finally:
            await server.close()

    before = time.process_time()
    return asyncio.run(send()), time.process_time() - before
