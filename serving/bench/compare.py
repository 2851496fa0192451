"""Benchmarks one server, or several in alternation (A B A B), so that other load on the machine affects all alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megakernel.serving.bench.client import Server
from megakernel.serving.bench.drive import drive
from megakernel.serving.bench.processes import drive_from
from megakernel.serving.bench.report import cpu_time, report
from megakernel.serving.bench.workload import Workload
from megakernel.serving.engine.scheduler import Counts

_WARM_UP_TOKENS = 4  # output tokens of each warm-up request


@dataclass(frozen=True)
class Load:
    """How the jobs are sent (see `drive`), and the limits for goodput (see `report`)."""

    rate: float = math.inf
    max_concurrency: int | None = None
    stream: bool = True
    goodput: dict[str, float] | None = None
    seed: int = 0
    warm_up: int = 8  # requests with short answers before each server's first run
    processes: int = 1  # client processes


async def alternate(
    servers: list[Server], workload: Workload, load: Load, runs: int, on_done: Callable[[int, int], None] | None = None
) -> list[list[dict[str, Any]]]:
    """Run the workload `runs` times on each server, in alternation. Returns a list of each server's runs.

    If the prompts are random token ids, each run of a server has different ids, so that no prefix cache helps.

    The entry `server` of a run's figures holds what the server itself reports at its path `/roofline` about the steps
    of the run. The entry is None if the server has no such path or counted no steps.
    """
    some = workload.again(runs).jobs[: load.warm_up]
    short = [replace(job, output_tokens=min(job.output_tokens, _WARM_UP_TOKENS)) for job in some]
    for server in servers:
        if short:
            await drive(server, Workload("warm-up", short), max_concurrency=load.max_concurrency)
    figures: list[list[dict[str, Any]]] = [[] for _ in servers]
    total = runs * len(servers) * len(workload.jobs)
    for number in range(runs * len(servers)):
        which = number % len(servers)
        server = servers[which]
        record, cpu = await server.get_json("/roofline"), await server.cpu_seconds()
        outcomes, client_s = await drive_from(
            load.processes,
            server,
            workload.again(number // len(servers)),
            rate=load.rate,
            max_concurrency=load.max_concurrency,
            seed=load.seed,
            stream=load.stream,
            on_done=partial(_shifted, on_done, number * len(workload.jobs), total) if on_done else None,
        )
        steps = _steps(record, await server.get_json("/roofline"))
        spent = {kind: seconds - cpu.get(kind, 0.0) for kind, seconds in (await server.cpu_seconds()).items()}
        figure = report(outcomes, load.goodput)
        figure |= cpu_time(spent | {"client": client_s}, figure["output_tokens"], figure["duration_s"], load.processes)
        figures[which].append(figure | {"server": steps})
    return figures


def _shifted(on_done: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    on_done(before + done, total)


def _steps(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the figures of the steps that a server ran between two answers, `before` and `after`, of its `/roofline`.

    The result is None if the server ran no steps or if an answer has no figures of steps.
    """
    if not before or not after or "total" not in before or "total" not in after:
        return None
    steps, wall, bound = (after["total"][name] - before["total"][name] for name in ("steps", "wall_s", "bound_s"))
    if not steps:
        return None
    counts = Counts(**after["counts"]) - Counts(**before["counts"]) if "counts" in after else Counts()
    return {"steps": steps, "step_s": wall / steps, "roofline_fraction": bound / wall, **counts.figures()}


async def describe(server: Server) -> dict[str, Any]:
    """Return a server's address, model and version."""
    version = await server.get_json("/version") or {}
    props = await server.get_json("/props") or {}  # of llama-server
    return {"url": server.url, "model": server.model, "version": version.get("version") or props.get("build_info")}
