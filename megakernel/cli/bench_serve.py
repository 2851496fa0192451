"""`megakernel bench serve`: puts load on any OpenAI-compatible server, or on two servers in turn."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from .. import machine
from ..errors import MegakernelError
from ..isa import Split
from ..model import PACKAGES, ModelConfig, load_config, load_tokenizer, local_checkpoint
from ..model.families import forward
from ..model.weight_types import bits_of, storage_of
from ..roofline import Ceilings, machine_ceilings
from . import output
from .options import UNLESS, fetch, verb, workload, workload_flags
from .this_machine import host_ceilings

if TYPE_CHECKING:
    from megakernel.serving.bench import ServerClient, Workload

_SERVER = """
--base-url | url | http://127.0.0.1:8000 | address of the server
--vs | url | - | address of a second server; runs alternate between the two
--model | model | (the server's) | model whose sizes and tokenizer are assumed, named as in `generate`
--served-model-name | name | (the first that the server lists) | name of the model in requests
--dtype | bf16/f32 | bf16 | type of KV and weights in the roofline if the model file does not name one: bf16 or f32
--machine | name | (the server's machine) | machine whose ceilings the roofline uses; host: measure this machine
--request-rate | rate | inf | requests per second as a Poisson process, or inf for all at once
--max-concurrency | count | (no limit) | maximum requests in flight
--runs | count | 1 | runs of each server
--disable-stream | switch | off | request whole answers instead of streams, without latencies per token
--goodput | NAME:MS... | - | also count the requests within these limits in ms (ttft, tpot, e2e), such as ttft:500
    tpot:50
"""


@verb("bench serve", _SERVER + workload_flags(256), unless=UNLESS | {"num_prompts": 256})
def run(args: argparse.Namespace) -> int:
    figures = asyncio.run(_measure(args))
    (output.emit if args.json else show)(figures)
    return 0 if figures["completed"] else 1


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from megakernel.scheduler import passes
    from megakernel.serving.bench import Load, ServerClient, against_roofline, alternate, describe, least_work
    from megakernel.serving.text.llm import DTYPES

    key = os.environ.get("OPENAI_API_KEY")
    servers = [ServerClient(url, model=args.served_model_name, api_key=key) for url in (args.base_url, args.vs) if url]
    for server in servers:
        await server.discover()
    ceilings = await _ceilings(args, servers)
    model, config, load = _workload(args, servers[0])
    sent = {
        "max_concurrency": args.max_concurrency,
        "stream": not args.disable_stream,
        "goodput": dict(args.goodput) if args.goodput else None,
        "seed": args.seed,
    }
    with output.progress("answered") as advance:
        runs = await alternate(servers, load, Load(args.request_rate, **sent), args.runs, advance)
    if ceilings is not None:
        split, in_flight = Split(config.sizes(DTYPES[args.dtype])), args.max_concurrency or len(load.jobs)
        bits = bits_of(config, storage_of(local_checkpoint(model), config, "auto"))
        phases = passes.apply(forward(config), split, weight_bits=bits)
        work = least_work(phases, split, load.jobs, in_flight, tied=config.tied)
        for one in (one for each in runs for one in each):
            one.update(against_roofline(work, ceilings, one["duration_s"], one["server"]))
    ours, *theirs = [_middle(each) for each in runs]
    said = [await describe(server) for server in servers]
    for server in servers:
        await server.close()
    return ours | {
        "step_s": (ours["server"] or {}).get("step_s"),
        "runs": runs[0],
        "vs": {
            about["url"]: {
                "tokens_per_s": other["tokens_per_s"],
                "ratio": ours["tokens_per_s"] / other["tokens_per_s"] if other["tokens_per_s"] else None,
                "runs": each,
                "settings": about,
            }
            for about, other, each in zip(said[1:], theirs, runs[1:], strict=True)
        },
        "ceilings": None if ceilings is None else asdict(ceilings),
        "settings": said[0]
        | {
            "workload": load.name,
            "num_prompts": len(load.jobs),
            "request_rate": args.request_rate,
            "dtype": args.dtype,
            **sent,
        },
    }


async def _ceilings(args: argparse.Namespace, servers: list[ServerClient]) -> Ceilings | None:
    """Return the maximum rates of the machine that the user names. If none is named, return the rates that a server
    reports, or None if no server does."""
    if args.machine == "host":
        return host_ceilings(machine.cpu_count())
    if args.machine:
        return machine_ceilings(machine.load(args.machine))
    for server in servers:
        found = await server.metrics()
        read, flops = (found.get(f"megakernel:ceiling_{what}_per_second", 0.0) for what in ("bytes", "flops"))
        if min(read, flops) > 0:
            return Ceilings(read, flops, 0, f"{server.url}/metrics", unit="OP/s")
    return None


def _workload(args: argparse.Namespace, server: ServerClient) -> tuple[str, ModelConfig, Workload]:
    """Return the model's name, its sizes and the requests to send. Without --model, the name comes from the server. It
    must then be the name of a model whose sizes are known."""
    name = args.model or server.model or ""
    if not args.model and name not in PACKAGES and not name.startswith("random:"):
        raise MegakernelError(
            f"{server.url} serves {name!r}, whose sizes are unknown: give a model of the same sizes with --model"
        )
    fetch(name)
    config = load_config(name)
    tokenizer = None

    def encode(text: str) -> list[int]:
        nonlocal tokenizer
        tokenizer = tokenizer or load_tokenizer(name)
        if tokenizer is None:
            raise MegakernelError(f"{name} has no tokenizer to count tokens: choose another --model or --dataset")
        return tokenizer.encode(text)

    return name, config, workload(args, config.vocab, encode)


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    middle = median(one["tokens_per_s"] for one in runs)
    return min(runs, key=lambda one: abs(float(one["tokens_per_s"]) - middle))


def show(figures: dict[str, Any]) -> None:
    """Print the figures of a run. If there were several runs, print the figures of the median run."""
    settings = figures["settings"]
    others = f", {figures['input_tokens_per_s']:.1f} in, {figures['requests_per_s']:.2f} requests/s"
    answered = f"{figures['completed']} answered in {figures['duration_s']:.1f} s, "
    rest = f", {figures['short']} of another length, at most {figures['max_in_flight']} at a time"
    lines: list[tuple[str, str | Text]] = [
        ("server", f"{settings['url']}, {settings['model']}"),
        ("workload", f"{settings['num_prompts']} prompts: {settings['workload']}"),
        ("requests", Text.assemble(answered, (f"{figures['failed']} failed", "red" * bool(figures["failed"])), rest)),
        ("tokens", f"{figures['input_tokens']:,} in, {figures['output_tokens']:,} out"),
        ("throughput", output.bold(f"{figures['tokens_per_s']:.1f} tokens/s out", others)),
    ]
    if figures["goodput_per_s"] is not None:
        limits = ", ".join(f"{name} {value * 1e3:g} ms" for name, value in settings["goodput"].items())
        lines.append(("goodput", f"{figures['goodput_per_s']:.2f} requests/s within {limits}"))
    if figures.get("roofline_fraction") is not None:
        least = f" of the time is the least time of this work: {output.rates(figures)}"
        lines.append(("roofline", output.bold(f"{figures['roofline_fraction']:.0%}", least)))
    if own := figures["server"]:
        text = f"{own['steps']}, {own['step_s'] * 1e3:.1f} ms each, least time {own['roofline_fraction']:.0%} of it"
        lines.append(("steps", text))
    if cpu := figures["cpu_us_per_token"]:
        spent = ", ".join(f"{kind} {value:.1f} µs" for kind, value in cpu.items())
        lines.append(("CPU per token", f"{spent}; the client busy for {figures['client_busy']:.0%} of the time"))
    for url, other in figures["vs"].items():
        ratio = "no answers" if other["ratio"] is None else f"{other['ratio']:.2f} x"
        lines.append(("versus", output.bold(ratio, f" the {other['tokens_per_s']:.1f} tokens/s of {url}")))
    output.rows(*lines)
    table = output.table("ms", "mean", "median", "p99")
    names = "to first token", "per later token", "between pieces", "whole answer"
    for key, name in zip(("ttft_s", "tpot_s", "itl_s", "e2e_s"), names, strict=True):
        values = [figures[key][column] for column in ("mean", "median", "p99")]
        table.add_row(name, *("-" if value is None else f"{value * 1e3:,.1f}" for value in values))
    output.stdout.print(table)
    for error in filter(None, [*figures["errors"], figures.get("roofline_error"), figures["client_error"]]):
        output.stderr.print(f"megakernel: warning: {error}")
